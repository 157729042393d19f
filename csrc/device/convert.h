// bf16 and fp16 as bits, and their conversions: hip_bf16.h is not in every ROCm, and a CPU build has neither.
#pragma once
#include "platform.h"

namespace turbo {
struct alignas(2) bf16 {
  uint16_t bits;
};
struct alignas(2) fp16 {
  uint16_t bits;
};

__host__ __device__ __forceinline__ float to_float(float x) { return x; }
__host__ __device__ __forceinline__ float to_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }

__host__ __device__ __forceinline__ float to_float(fp16 x) {
#if defined(__HIP__)
  return float(bits_as<_Float16>(x.bits));
#elif defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // As fp32 bits, an fp16 is 2^112 too small: one exact product repairs normals and subnormals alike.
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(magnitude << 13) * 0x1p112f));
#endif
}

// Round to nearest even; NaN stays NaN.
__host__ __device__ __forceinline__ void from_float(float x, float &out) { out = x; }

__host__ __device__ __forceinline__ void from_float(float x, bf16 &out) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = uint16_t((is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__host__ __device__ __forceinline__ void from_float(float x, fp16 &out) {
#if defined(__HIP__)
  out.bits = bits_as<uint16_t>(static_cast<_Float16>(x));
#elif defined(__CUDA_ARCH__)
  out.bits = __half_as_ushort(__float2half_rn(x));
#else
  const uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded value in the low bits
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out.bits = uint16_t(sign | half);
#endif
}

// x as a T would hold it.
template <typename T>
__host__ __device__ __forceinline__ float rounded(float x) {
  T held;
  from_float(x, held);
  return to_float(held);
}
}  // namespace turbo

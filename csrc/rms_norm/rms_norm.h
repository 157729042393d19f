// What forward and backward share: types, and the shape of a launch.
#pragma once
#include "../device/convert.h"
#include "../device/reduce.h"
#include "../turbo_kernels.h"

namespace turbo {
// Calls body(T{}, W{}, Y{}) for x, weight and y; -1 where there is no such combination.
template <typename Body>
int with_types(int dtype, int weight_dtype, int round_first, Body body) {
  if (weight_dtype == TURBO_FP32 && dtype != TURBO_FP32) {
    if (dtype == TURBO_BF16) return round_first ? body(bf16{}, 0.f, 0.f) : body(bf16{}, 0.f, bf16{});
    if (dtype == TURBO_FP16) return round_first ? body(fp16{}, 0.f, 0.f) : body(fp16{}, 0.f, fp16{});
  }
  if (weight_dtype != dtype) return -1;
  if (dtype == TURBO_FP32) return body(0.f, 0.f, 0.f);
  if (dtype == TURBO_BF16) return body(bf16{}, bf16{}, bf16{});
  if (dtype == TURBO_FP16) return body(fp16{}, fp16{}, fp16{});
  return -1;
}

#if defined(TURBO_GPU)
template <int kHeld_, int kVector_>
struct Extents {
  static constexpr int kHeld = kHeld_, kVector = kVector_;
};

inline bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// A power of two of threads, a warp at least, that gives each about 8 elements of a row.
inline int block_for(int64_t width) {
  int threads = kWarp;
  while (threads < kMaxBlock && threads * 8 < width) threads *= 2;
  return threads;
}

// Calls body with (elements a thread holds of a row, elements it moves at once) as compile-time constants.
template <int kVector, typename Body>
int with_extents(int64_t width, bool vectors, Body body) {
  const int64_t held = (width + block_for(width) - 1) / block_for(width);
  if (!vectors) return held <= 16 ? body(Extents<16, 1>{}) : -1;  // 32 spill 2000 registers on CDNA
  if (held <= 8) return body(Extents<8, kVector>{});
  if (held <= 16) return body(Extents<16, kVector>{});
  return held <= 32 ? body(Extents<32, kVector>{}) : -1;
}
#endif
}  // namespace turbo

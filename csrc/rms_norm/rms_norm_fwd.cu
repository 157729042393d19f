// y = x * rsqrt(mean(x^2) + eps) * (weight + offset), arXiv 1910.07467. A block takes a row and reads it
// once.
#include "rms_norm.h"

namespace turbo {
template <typename T, typename Y>
__host__ __device__ __forceinline__ void scale_one(float x, float rstd, float gain, int round_first, Y &y) {
  const float x_hat = x * rstd;
  from_float((round_first ? rounded<T>(x_hat) : x_hat) * gain, y);
}

#if defined(TURBO_GPU)
template <typename T, typename W, typename Y, int kHeld, int kVector>
__global__ void __launch_bounds__(kMaxBlock)
    rms_norm_fwd_kernel(const T *__restrict__ x, const W *__restrict__ weight, Y *__restrict__ y,
                        float *__restrict__ rstd, int width, float eps, float offset, int round_first) {
  constexpr int kPacks = kHeld / kVector;
  const int64_t row = int64_t(blockIdx.x) * width;
  Pack<T, kVector> held[kPacks];
  float squares = 0.f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = (p * int(blockDim.x) + int(threadIdx.x)) * kVector;
    if (at < width) {
      held[p] = *reinterpret_cast<const Pack<T, kVector> *>(x + row + at);
#pragma unroll
      for (int v = 0; v < kVector; ++v) squares += to_float(held[p].at[v]) * to_float(held[p].at[v]);
    }
  }
  const float r = 1.f / sqrtf(block_sum(squares) / float(width) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = r;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = (p * int(blockDim.x) + int(threadIdx.x)) * kVector;
    if (at < width) {
      const auto w = *reinterpret_cast<const Pack<W, kVector> *>(weight + at);
      Pack<Y, kVector> out;
#pragma unroll
      for (int v = 0; v < kVector; ++v)
        scale_one<T>(to_float(held[p].at[v]), r, to_float(w.at[v]) + offset, round_first, out.at[v]);
      *reinterpret_cast<Pack<Y, kVector> *>(y + row + at) = out;
    }
  }
}

template <typename T, typename W, typename Y>
int on_gpu(const TurboRmsNormFwd &a, void *stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const bool vectors = a.width % kVector == 0 && aligned(a.x) && aligned(a.weight) && aligned(a.y);
  return with_extents<kVector>(a.width, vectors, [&](auto extents) {
    constexpr auto kernel = rms_norm_fwd_kernel<T, W, Y, extents.kHeld, extents.kVector>;
    TURBO_LAUNCH(kernel, dim3(unsigned(a.rows)), dim3(unsigned(block_for(a.width))), stream,
                 static_cast<const T *>(a.x), static_cast<const W *>(a.weight), static_cast<Y *>(a.y), a.rstd,
                 int(a.width), a.eps, a.offset, a.round_first);
    return last_error();
  });
}
#endif

template <typename T, typename W, typename Y>
int on_cpu(const TurboRmsNormFwd &a) {
  const W *weight = static_cast<const W *>(a.weight);
  for (int64_t row = 0; row < a.rows; ++row) {
    const T *x = static_cast<const T *>(a.x) + row * a.width;
    Y *y = static_cast<Y *>(a.y) + row * a.width;
    double squares = 0;
    for (int64_t i = 0; i < a.width; ++i) squares += double(to_float(x[i])) * to_float(x[i]);
    const float r = 1.f / std::sqrt(float(squares / double(a.width)) + a.eps);
    a.rstd[row] = r;
    for (int64_t i = 0; i < a.width; ++i)
      scale_one<T>(to_float(x[i]), r, to_float(weight[i]) + a.offset, a.round_first, y[i]);
  }
  return 0;
}
}  // namespace turbo

extern "C" int turbo_rms_norm_fwd(const TurboRmsNormFwd *args, int device, void *stream) {
  return turbo::with_types(args->dtype, args->weight_dtype, args->round_first, [&](auto x, auto w, auto y) {
    using T = decltype(x);
    using W = decltype(w);
    using Y = decltype(y);
    if (device < 0) return turbo::on_cpu<T, W, Y>(*args);
#if defined(TURBO_GPU)
    return args->rows ? turbo::on_gpu<T, W, Y>(*args, stream) : 0;
#else
    return (void)stream, -2;
#endif
  });
}

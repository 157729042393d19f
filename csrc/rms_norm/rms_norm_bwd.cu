// grad_x = rstd * (g - x_hat * mean(g * x_hat)) with g = grad_y * (weight + offset); grad_weight = sum of
// grad_y * x_hat. Every block takes each gridDim.x-th row and leaves its share of grad_weight in `partial`; a
// second kernel adds the shares up, in one order, so that runs are bitwise equal.
#include <vector>

#include "rms_norm.h"

namespace turbo {
#if defined(TURBO_GPU)
template <typename T, typename W, typename Y, int kHeld, int kVector>
__global__ void __launch_bounds__(kMaxBlock, 1)
    rms_norm_bwd_kernel(const Y *__restrict__ grad_y, const T *__restrict__ x, const W *__restrict__ weight,
                        const float *__restrict__ rstd, T *__restrict__ grad_x, float *__restrict__ partial,
                        int64_t rows, int width, float offset, int round_first) {
  constexpr int kPacks = kHeld / kVector;
  float grad_gain[kHeld] = {};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t first = row * width;
    const float r = rstd[row];
    Pack<T, kVector> held_x[kPacks];
    Pack<Y, kVector> held_grad[kPacks];
    float dot = 0.f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = (p * int(blockDim.x) + int(threadIdx.x)) * kVector;
      if (at < width) {
        held_x[p] = *reinterpret_cast<const Pack<T, kVector> *>(x + first + at);
        held_grad[p] = *reinterpret_cast<const Pack<Y, kVector> *>(grad_y + first + at);
        const auto w = *reinterpret_cast<const Pack<W, kVector> *>(weight + at);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const float x_hat = to_float(held_x[p].at[v]) * r, grad = to_float(held_grad[p].at[v]);
          dot += grad * (to_float(w.at[v]) + offset) * x_hat;
          grad_gain[p * kVector + v] += grad * (round_first ? rounded<T>(x_hat) : x_hat);
        }
      }
    }
    const float mean = block_sum(dot) / float(width);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = (p * int(blockDim.x) + int(threadIdx.x)) * kVector;
      if (at < width) {
        const auto w = *reinterpret_cast<const Pack<W, kVector> *>(weight + at);
        Pack<T, kVector> out;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          const float x_hat = to_float(held_x[p].at[v]) * r;
          from_float(r * (to_float(held_grad[p].at[v]) * (to_float(w.at[v]) + offset) - x_hat * mean),
                     out.at[v]);
        }
        *reinterpret_cast<Pack<T, kVector> *>(grad_x + first + at) = out;
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int at = (p * int(blockDim.x) + int(threadIdx.x)) * kVector;
#pragma unroll
    for (int v = 0; v < kVector; ++v)
      if (at + v < width) partial[int64_t(blockIdx.x) * width + at + v] = grad_gain[p * kVector + v];
  }
}

constexpr int kColumns = 32, kGroups = 8;

// 32 columns a block, 8 threads a column.
template <typename W>
__global__ void __launch_bounds__(kColumns *kGroups)
    add_partials_kernel(const float *__restrict__ partial, W *__restrict__ grad_weight, int partials,
                        int width) {
  __shared__ float sums[kGroups][kColumns];
  const int lane = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const int column = blockIdx.x * kColumns + lane;
  float sum = 0.f;
  if (column < width)
    for (int p = group; p < partials; p += kGroups) sum += partial[int64_t(p) * width + column];
  sums[group][lane] = sum;
  __syncthreads();
  if (group == 0 && column < width) {
    for (int g = 1; g < kGroups; ++g) sum += sums[g][lane];
    from_float(sum, grad_weight[column]);
  }
}

template <typename T, typename W, typename Y>
int on_gpu(const TurboRmsNormBwd &a, int device, void *stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const bool vectors =
      a.width % kVector == 0 && aligned(a.x) && aligned(a.weight) && aligned(a.grad_y) && aligned(a.grad_x);
  const int partials = int(turbo_rms_norm_bwd_partials(a.rows, device));
  const int code = with_extents<kVector>(a.width, vectors, [&](auto extents) {
    constexpr auto kernel = rms_norm_bwd_kernel<T, W, Y, extents.kHeld, extents.kVector>;
    TURBO_LAUNCH(kernel, dim3(unsigned(partials)), dim3(unsigned(block_for(a.width))), stream,
                 static_cast<const Y *>(a.grad_y), static_cast<const T *>(a.x),
                 static_cast<const W *>(a.weight), a.rstd, static_cast<T *>(a.grad_x), a.partial, a.rows,
                 int(a.width), a.offset, a.round_first);
    return last_error();
  });
  if (code) return code;
  constexpr auto add = add_partials_kernel<W>;
  TURBO_LAUNCH(add, dim3(unsigned((a.width + kColumns - 1) / kColumns)), dim3(kColumns * kGroups), stream,
               static_cast<const float *>(a.partial), static_cast<W *>(a.grad_weight), partials,
               int(a.width));
  return last_error();
}
#endif

template <typename T, typename W, typename Y>
int on_cpu(const TurboRmsNormBwd &a) {
  const W *weight = static_cast<const W *>(a.weight);
  std::vector<float> grad_gain(size_t(a.width), 0.f);
  for (int64_t row = 0; row < a.rows; ++row) {
    const Y *grad_y = static_cast<const Y *>(a.grad_y) + row * a.width;
    const T *x = static_cast<const T *>(a.x) + row * a.width;
    T *grad_x = static_cast<T *>(a.grad_x) + row * a.width;
    const float r = a.rstd[row];
    double dot = 0;
    for (int64_t i = 0; i < a.width; ++i) {
      const float x_hat = to_float(x[i]) * r, grad = to_float(grad_y[i]);
      dot += double(grad * (to_float(weight[i]) + a.offset)) * x_hat;
      grad_gain[size_t(i)] += grad * (a.round_first ? rounded<T>(x_hat) : x_hat);
    }
    const float mean = float(dot / double(a.width));
    for (int64_t i = 0; i < a.width; ++i) {
      const float scaled = to_float(grad_y[i]) * (to_float(weight[i]) + a.offset);
      from_float(r * (scaled - to_float(x[i]) * r * mean), grad_x[i]);
    }
  }
  for (int64_t i = 0; i < a.width; ++i) from_float(grad_gain[size_t(i)], static_cast<W *>(a.grad_weight)[i]);
  return 0;
}
}  // namespace turbo

extern "C" {
// Two blocks of 512 threads fill a multiprocessor; more would only grow `partial`.
int64_t turbo_rms_norm_bwd_partials(int64_t rows, int device) {
  const int64_t most = device < 0 ? 0 : 2 * turbo::multiprocessors(device);
  return rows < most ? rows : most;
}

int turbo_rms_norm_bwd(const TurboRmsNormBwd *args, int device, void *stream) {
  return turbo::with_types(args->dtype, args->weight_dtype, args->round_first, [&](auto x, auto w, auto y) {
    using T = decltype(x);
    using W = decltype(w);
    using Y = decltype(y);
    if (device < 0 || args->rows == 0) return device < 0 ? turbo::on_cpu<T, W, Y>(*args) : 0;
#if defined(TURBO_GPU)
    return turbo::on_gpu<T, W, Y>(*args, device, stream);
#else
    return (void)stream, -2;
#endif
  });
}
}

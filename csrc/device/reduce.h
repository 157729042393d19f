// Sums over a block.
#pragma once
#include "platform.h"

namespace turbo {
constexpr int kMaxBlock = 512;

#if defined(TURBO_GPU)
// The sum of `value` over the block, on every thread, in an order that depends on the block's size alone.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float parts[kMaxBlock / kWarp];
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  const int warps = (blockDim.x + kWarp - 1) / kWarp;
  __syncthreads();  // the sum before this one may still be read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  float sum = 0.f;
  for (int warp = 0; warp < warps; ++warp) sum += parts[warp];
  return sum;
}
#endif
}  // namespace turbo

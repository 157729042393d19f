// HIP (gfx942, gfx950), CUDA (sm_90a) or plain C++ behind one set of names.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#if defined(TURBO_EMULATE)  // kernel bodies on the CPU as wave64 fibers: tests only
#include "emulator.h"
#define TURBO_GPU 1
#elif defined(__HIP__)
#include <hip/hip_runtime.h>
#define TURBO_GPU 1
#define TURBO_RUNTIME(name) hip##name
#elif defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define TURBO_GPU 1
#define TURBO_RUNTIME(name) cuda##name
#else
#define __host__
#define __device__
#define __forceinline__ inline
#endif

// g++ cannot parse <<<>>>, and the emulator runs a launch as a call.
#if defined(TURBO_EMULATE)
#define TURBO_LAUNCH(kernel, grid, block, stream, ...) emu::launch(grid, block, [=] { kernel(__VA_ARGS__); })
#elif defined(TURBO_GPU)
#define TURBO_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, static_cast<TURBO_RUNTIME(Stream_t)>(stream)>>>(__VA_ARGS__)
#endif

namespace turbo {
#if defined(__HIP__) || defined(TURBO_EMULATE)
constexpr int kWarp = 64;
#else
constexpr int kWarp = 32;
#endif

#if defined(TURBO_GPU)
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
#if defined(__CUDACC__) && !defined(__HIP__)
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return __shfl_xor(value, mask);
#endif
}
#endif

// 0, or the code of what went wrong with the launch before.
inline int last_error() {
#if defined(TURBO_RUNTIME)
  return int(TURBO_RUNTIME(GetLastError)());
#else
  return 0;
#endif
}

inline int multiprocessors(int device) {
#if defined(__HIP__)
  int count = 0;
  return hipDeviceGetAttribute(&count, hipDeviceAttributeMultiprocessorCount, device) ? 1 : count;
#elif defined(__CUDACC__)
  int count = 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) ? 1 : count;
#else
  return (void)device, 1;
#endif
}

template <typename To, typename From>
__host__ __device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  union {
    From from;
    To to;
  } both = {from};
  return both.to;
}

// N values that move as one load or store.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
}  // namespace turbo

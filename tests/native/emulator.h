// Kernel bodies on the CPU as wave64: every thread of a block is a fiber, a wave is 64 of them in step. Tests
// only.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x;
  explicit dim3(unsigned x = 1) : x(x) {}
};

namespace emu {
constexpr int kLanes = 64;
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(128 * 1024);
  bool done;
};
// A barrier counts arrivals; whoever waits yields until its generation is over.
struct Barrier {
  int arrived = 0, generation = 0;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline std::vector<Barrier> waves;
inline Barrier block;
inline std::vector<float> lanes;
inline dim3 thread, block_index, block_size, grid_size;

inline void wait(Barrier &barrier, int threads) {
  const unsigned self = thread.x;
  const int generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) swapcontext(&fibers[self].context, &scheduler);
  thread.x = self;
}

inline void wait_wave() {
  const int wave = int(thread.x) / kLanes;
  wait(waves[size_t(wave)], std::min(kLanes, int(block_size.x) - wave * kLanes));
}

inline void run_fiber() {
  const unsigned self = thread.x;
  body();
  fibers[self].done = true;
  swapcontext(&fibers[self].context, &scheduler);
}

inline void launch(dim3 grid, dim3 threads, std::function<void()> kernel) {
  body = std::move(kernel);
  grid_size = grid;
  block_size = threads;
  const unsigned n = threads.x;
  if (fibers.size() < n) fibers.resize(n);
  lanes.assign(n, 0.f);
  for (unsigned b = 0; b < grid.x; ++b) {
    block_index.x = b;
    block = Barrier{};
    waves.assign((n + kLanes - 1) / kLanes, Barrier{});
    for (unsigned t = 0; t < n; ++t) {
      Fiber &fiber = fibers[t];
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (unsigned left = n; left > 0;) {
      for (unsigned t = 0; t < n; ++t) {
        if (fibers[t].done) continue;
        thread.x = t;
        swapcontext(&scheduler, &fibers[t].context);
        left -= fibers[t].done;
      }
    }
  }
}
}  // namespace emu

#define threadIdx emu::thread
#define blockIdx emu::block_index
#define blockDim emu::block_size
#define gridDim emu::grid_size

inline void __syncthreads() { emu::wait(emu::block, int(emu::block_size.x)); }

inline float __shfl_xor(float value, int mask) {
  const unsigned self = threadIdx.x;
  emu::lanes[self] = value;
  emu::wait_wave();
  const float other = emu::lanes[self / emu::kLanes * emu::kLanes + ((self % emu::kLanes) ^ unsigned(mask))];
  emu::wait_wave();
  return other;
}

// What this build is.
#include "../turbo_kernels.h"
#include "platform.h"

#if defined(TURBO_RUNTIME)
#if defined(__HIP__)
#define TURBO_BACKEND "hip"
#else
#define TURBO_BACKEND "cuda"
#endif
#else
#define TURBO_BACKEND "cpu"
#endif
#ifndef TURBO_ARCHS
#define TURBO_ARCHS ""
#endif

extern "C" {
const char *turbo_backend(void) { return TURBO_BACKEND; }
const char *turbo_archs(void) { return TURBO_ARCHS; }
const char *turbo_error(int code) {
  if (code == -1) return "no kernel for these dtypes or this width";
  if (code == -2) return "this build has no GPU kernels";
#if defined(TURBO_RUNTIME)
  return TURBO_RUNTIME(GetErrorString)(static_cast<TURBO_RUNTIME(Error_t)>(code));
#else
  return "unknown error";
#endif
}
}

/* libturbo_kernels.so: no torch, no Python. device -1 is the CPU; stream is a hipStream_t or cudaStream_t.
   Functions return 0, or an error code that turbo_error() puts into words. Tensors are contiguous, row-major.
 */
#pragma once
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif
#define TURBO_API __attribute__((visibility("default")))

enum TurboDtype { TURBO_FP32 = 0, TURBO_BF16 = 1, TURBO_FP16 = 2 };

/* A row has at most 16384 elements on a GPU, 8192 where it is not a multiple of 16 bytes; any number on the
 * CPU. */
typedef struct {
  const void *x;      /* [rows, width] of dtype */
  const void *weight; /* [width] of dtype or fp32 */
  void *y;            /* [rows, width] of dtype; of weight_dtype where round_first */
  float *rstd;        /* [rows] */
  int64_t rows, width;
  float eps, offset;
  int round_first, dtype, weight_dtype;
} TurboRmsNormFwd;

typedef struct {
  const void *grad_y; /* [rows, width], of y's dtype */
  const void *x, *weight;
  const float *rstd;
  void *grad_x;      /* [rows, width] of dtype */
  void *grad_weight; /* [width] of weight_dtype */
  float *partial;    /* [turbo_rms_norm_bwd_partials(), width] */
  int64_t rows, width;
  float offset;
  int round_first, dtype, weight_dtype;
} TurboRmsNormBwd;

TURBO_API int turbo_rms_norm_fwd(const TurboRmsNormFwd *args, int device, void *stream);
TURBO_API int turbo_rms_norm_bwd(const TurboRmsNormBwd *args, int device, void *stream);
TURBO_API int64_t turbo_rms_norm_bwd_partials(int64_t rows, int device);

TURBO_API const char *turbo_backend(void); /* "hip", "cuda" or "cpu" */
TURBO_API const char *turbo_archs(void);   /* "gfx942;gfx950", "sm90" or "" */
TURBO_API const char *turbo_error(int code);
#if defined(__cplusplus)
}
#endif

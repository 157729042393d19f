// rms_norm_fwd and rms_norm_bwd as torch operators, over torch's stable ABI: one build serves torch 2.11 and
// later. Fakes are in Python (turbo_ops/rms_norm/backend_native.py): the stable ABI has no symbolic sizes.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

#include "../turbo_kernels.h"

// Weak: a CPU build of torch does not have it.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int dtype_of(const Tensor &t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return TURBO_FP32;
    case ScalarType::BFloat16:
      return TURBO_BF16;
    case ScalarType::Half:
      return TURBO_FP16;
    default:
      STD_TORCH_CHECK(false, "turbo::rms_norm: tensors must be fp32, bf16 or fp16");
  }
  return -1;
}

void check(const Tensor &x, const Tensor &weight) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1),
                  "turbo::rms_norm: x must be [T, D] and weight [D]");
  STD_TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "turbo::rms_norm: tensors must be contiguous");
  STD_TORCH_CHECK(x.get_device_index() == weight.get_device_index(),
                  "turbo::rms_norm: tensors on one device");
}

ScalarType y_dtype(const Tensor &x, const Tensor &weight, bool round_first) {
  return round_first && weight.scalar_type() == ScalarType::Float ? ScalarType::Float : x.scalar_type();
}

// Runs call(device, stream) on x's device and current stream; device is -1 on the CPU.
template <typename Call>
void run(const Tensor &x, Call call) {
  int code;
  if (x.is_cpu()) {
    code = call(-1, nullptr);
  } else {
    const int device = x.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void *stream = nullptr;
    STD_TORCH_CHECK(
        aoti_torch_get_current_cuda_stream && !aoti_torch_get_current_cuda_stream(device, &stream),
        "turbo::rms_norm: this torch gives no stream");
    code = call(device, stream);
  }
  STD_TORCH_CHECK(code == 0, "turbo::rms_norm: ", turbo_error(code));
}

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor &x, const Tensor &weight, double eps, double offset,
                                        bool round_first) {
  check(x, weight);
  Tensor y = torch::stable::new_empty(x, {x.size(0), x.size(1)}, y_dtype(x, weight, round_first));
  Tensor rstd = torch::stable::new_empty(x, {x.size(0)}, ScalarType::Float);
  const TurboRmsNormFwd args{x.const_data_ptr(),
                             weight.const_data_ptr(),
                             y.mutable_data_ptr(),
                             static_cast<float *>(rstd.mutable_data_ptr()),
                             x.size(0),
                             x.size(1),
                             float(eps),
                             float(offset),
                             round_first,
                             dtype_of(x),
                             dtype_of(weight)};
  run(x, [&](int device, void *stream) { return turbo_rms_norm_fwd(&args, device, stream); });
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor &grad_y, const Tensor &x, const Tensor &weight,
                                        const Tensor &rstd, double offset, bool round_first) {
  check(x, weight);
  STD_TORCH_CHECK(grad_y.is_contiguous() && grad_y.numel() == x.numel() &&
                      grad_y.scalar_type() == y_dtype(x, weight, round_first),
                  "turbo::rms_norm: grad_y must be contiguous, of y's shape and dtype");
  STD_TORCH_CHECK(
      rstd.is_contiguous() && rstd.numel() == x.size(0) && rstd.scalar_type() == ScalarType::Float,
      "turbo::rms_norm: rstd must be fp32 [T]");
  Tensor grad_x = torch::stable::new_empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  Tensor grad_weight = x.size(0) ? torch::stable::new_empty(weight, {x.size(1)})
                                 : torch::stable::new_zeros(weight, {x.size(1)});
  const int64_t partials = turbo_rms_norm_bwd_partials(x.size(0), x.is_cpu() ? -1 : x.get_device_index());
  Tensor partial = torch::stable::new_empty(x, {partials, x.size(1)}, ScalarType::Float);
  const TurboRmsNormBwd args{grad_y.const_data_ptr(),
                             x.const_data_ptr(),
                             weight.const_data_ptr(),
                             static_cast<const float *>(rstd.const_data_ptr()),
                             grad_x.mutable_data_ptr(),
                             grad_weight.mutable_data_ptr(),
                             static_cast<float *>(partial.mutable_data_ptr()),
                             x.size(0),
                             x.size(1),
                             float(offset),
                             round_first,
                             dtype_of(x),
                             dtype_of(weight)};
  run(x, [&](int device, void *stream) { return turbo_rms_norm_bwd(&args, device, stream); });
  return {grad_x, grad_weight};
}
}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(turbo, m) {
  m.def(
      "rms_norm_fwd(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_bwd(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd, float offset, bool round_first)"
      " -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(turbo, CPU, m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  m.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(turbo, CUDA, m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  m.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
}

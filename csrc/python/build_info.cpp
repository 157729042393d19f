// What setup.py built, for turbo_ops.native.build_info(): not a tensor operator, so pybind11 and not torch's
// ABI.
#include "build_info.h"  // written by setup.py: kBackend, kArchs, kCompiler, kKernels

#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_build_info, m) {
  m.def("build_info", [] {
    py::list kernels;
    for (const auto &kernel : kKernels) {
      py::dict row;
      row["arch"] = kernel.arch;
      row["name"] = kernel.name;
      row["registers"] = kernel.registers;
      row["spills"] = kernel.spills;
      kernels.append(row);
    }
    py::dict info;
    info["backend"] = kBackend;
    info["archs"] = *kArchs ? py::object(py::str(kArchs).attr("split")(";")) : py::object(py::list());
    info["compiler"] = kCompiler;
    info["kernels"] = kernels;
    return info;
  });
}

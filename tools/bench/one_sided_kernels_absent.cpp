/// Replaces one_sided_kernels.cu in a build without the CUDA backend.

#include "bench/one_sided_kernels.hpp"

namespace ferry::tools {

namespace {

Status absent() {
  return {ErrorCode::kUnsupported,
          "this build has no CUDA backend; configure with -DFERRY_CUDA=ON where nvcc is found"};
}

}  // namespace

Status launch_exchanges(const OneSidedKernelParams&, Stream) { return absent(); }
Status launch_window(const OneSidedKernelParams&, Stream) { return absent(); }

}  // namespace ferry::tools

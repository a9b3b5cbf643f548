#include "net/ucx/engine.hpp"

namespace ferry::net::ucx {

Status probe() {
  return Status(ErrorCode::kUnsupported,
                "network engine ucx: this library was built without UCX's headers; install them (libucx-dev on Debian "
                "and Ubuntu) and build again with -DFERRY_UCX=ON");
}

std::string library_in_use() { return {}; }

GpuDirectFact gpu_memory_fact() {
  return {"network library", false, "built without UCX's headers", "build with -DFERRY_UCX=ON"};
}

Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& /*options*/) { return probe(); }

}  // namespace ferry::net::ucx

#include <fmt/format.h>

#include <string>

#include "net/ucx/engine.hpp"
#include "net/ucx/library.hpp"

namespace ferry::net::ucx {
namespace {

constexpr const char* kName = "network library";

/// Kinds of memory that a context of this process works with, under UCX's variables.
Result<std::uint64_t> memory_types(const Library& library) {
  ucp_config_t* config = nullptr;
  Status status = ucx_status(library.config_read(nullptr, nullptr, &config), "reading the UCX_* variables");
  if (!status.ok()) return status;
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA;
  ucp_context_h context = nullptr;
  status =
      ucx_status(library.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context), "opening a context");
  library.config_release(config);
  if (!status.ok()) return status;
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  status = ucx_status(library.context_query(context, &attributes), "querying the memory types");
  library.cleanup(context);
  if (!status.ok()) return status;
  return attributes.memory_types;
}

}  // namespace

GpuDirectFact gpu_memory_fact() {
  const Result<const Library*> table = library();
  if (!table.ok()) return {kName, false, std::string(table.status().message()), "install UCX with its CUDA transports"};
  const Result<std::uint64_t> types = memory_types(**table);
  if (!types.ok()) return {kName, false, std::string(types.status().message()), "check the UCX_* variables"};
  const bool knows_cuda = (*types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  return {kName, knows_cuda,
          fmt::format("{}: {}", (*table)->file, knows_cuda ? "works with GPU memory" : "works with host memory only"),
          knows_cuda
              ? ""
              : "name a UCX with its CUDA transports in FERRY_UCX_LIBRARY; it finds them where there is a GPU and "
                "UCX_TLS, if set, allows cuda_copy"};
}

}  // namespace ferry::net::ucx

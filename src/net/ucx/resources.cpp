#include "net/ucx/resources.hpp"

#include <cstdlib>
#include <string>
#include <string_view>

namespace ferry::net::ucx {
namespace {

/// What this engine sets unless the environment does.
/// By default UCX probes silent peers every 20 s, which is long for survivors.
constexpr const char* kKeepaliveInterval = "2s";
/// TCP has no puts of its own, so UCX sends them as messages of at most a segment, usually 8 KiB. Measured on one host
/// (docs/transport.md), segments of 256 KiB carry three times as many bytes a second. A segment must fit the receiver's
/// buffer, so both are set together.
constexpr const char* kTcpSegment = "256K";

bool is_set(const char* variable) { return std::getenv(variable) != nullptr; }

bool tcp_is_allowed() {
  const char* transports = std::getenv("UCX_TLS");
  const std::string_view list = transports != nullptr ? transports : "all";
  return list.find("tcp") != std::string_view::npos || list.find("all") != std::string_view::npos;
}

/// Settings that another version of UCX does not know have no effect.
void fill_in(const Library& library, ucp_config_t* config) {
  if (!is_set("UCX_KEEPALIVE_INTERVAL")) library.config_modify(config, "KEEPALIVE_INTERVAL", kKeepaliveInterval);
  if (tcp_is_allowed() && !is_set("UCX_TCP_TX_SEG_SIZE") && !is_set("UCX_TCP_RX_SEG_SIZE")) {
    // A transport's own settings are named without its prefix, and only tcp has these.
    library.config_modify(config, "TX_SEG_SIZE", kTcpSegment);
    library.config_modify(config, "RX_SEG_SIZE", kTcpSegment);
  }
}

constexpr std::string_view kVariablesHint = "check the UCX_* variables (UCX_LOG_LEVEL=info makes UCX report more)";

}  // namespace

Result<std::unique_ptr<Resources>> Resources::create(const Library& library, std::span<std::byte> memory,
                                                     std::size_t memory_bytes) {
  std::unique_ptr<Resources> resources(new Resources(library, memory));
  if (Status status = resources->open_context(); !status.ok()) return status;
  if (Status status = resources->map_memory(memory_bytes); !status.ok()) return status;
  if (Status status = resources->open_worker(); !status.ok()) return status;
  return resources;
}

Resources::~Resources() {
  if (worker_ != nullptr) library_.worker_destroy(worker_);
  if (mapped_ != nullptr) library_.mem_unmap(context_, mapped_);
  if (context_ != nullptr) library_.cleanup(context_);
}

Status Resources::open_context() {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t read = library_.config_read(nullptr, nullptr, &config); read != UCS_OK) {
    const Status reason = ucx_status(read, "reading the UCX_* variables", kVariablesHint);
    return Status(ErrorCode::kInvalidArgument, std::string(reason.message()));
  }
  fill_in(library_, config);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "ferry";
  const ucs_status_t opened = library_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  library_.config_release(config);
  return ucx_status(opened, "opening a context", kVariablesHint);
}

Status Resources::map_memory(std::size_t memory_bytes) {
  if (memory_.empty() && memory_bytes == 0) return {};
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory_.data();
  params.length = memory_.size();
  if (memory_.empty()) {
    // Over shared memory UCX performs puts as stores only into segments it allocated.
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.length = memory_bytes;
    params.flags = UCP_MEM_MAP_ALLOCATE;
  }
  if (Status status = ucx_status(library_.mem_map(context_, &params, &mapped_), "registering memory",
                                 "a network card needs locked memory: raise its limit (ulimit -l)");
      !status.ok()) {
    return status;
  }
  if (memory_.empty()) {
    if (Status status = find_allocated(); !status.ok()) return status;
    memory_ = memory_.first(memory_bytes);
  }
  void* packed = nullptr;
  std::size_t num_bytes = 0;
  if (Status status =
          ucx_status(library_.rkey_pack(context_, mapped_, &packed, &num_bytes), "packing the memory's key");
      !status.ok()) {
    return status;
  }
  const auto* first = static_cast<const std::byte*>(packed);
  remote_key_.assign(first, first + num_bytes);
  library_.rkey_buffer_release(packed);
  return {};
}

/// UCX may allocate more than requested.
Status Resources::find_allocated() {
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH;
  const ucs_status_t found = library_.mem_query(mapped_, &attributes);
  if (found == UCS_OK) memory_ = {static_cast<std::byte*>(attributes.address), attributes.length};
  return ucx_status(found, "querying the allocated memory");
}

Status Resources::open_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // the rank's thread and the proxy's use it in turn
  if (Status status =
          ucx_status(library_.worker_create(context_, &params, &worker_), "opening a worker", kVariablesHint);
      !status.ok()) {
    return status;
  }
  if (Status status = ucx_status(library_.worker_get_efd(worker_, &event_fd_), "querying the worker's descriptor",
                                 "UCX_TLS must name a transport that can wake a sleeping process");
      !status.ok()) {
    return status;
  }
  ucp_address_t* address = nullptr;
  std::size_t num_bytes = 0;
  if (Status status = ucx_status(library_.worker_get_address(worker_, &address, &num_bytes), "querying the address");
      !status.ok()) {
    return status;
  }
  const auto* first = reinterpret_cast<const std::byte*>(address);
  address_.assign(first, first + num_bytes);
  library_.worker_release_address(worker_, address);
  return {};
}

}  // namespace ferry::net::ucx

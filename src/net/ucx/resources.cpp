#include "net/ucx/resources.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "net/ucx/limits.hpp"
#include "net/ucx/message.hpp"

namespace ferry::net::ucx {
namespace {

/// Settings of this engine, unless the environment sets them.
/// Interval of keepalive probes: UCX's default of 20 s is long for survivors.
constexpr const char* kKeepaliveInterval = "2s";
/// Size for a message with a full payload (kMaxPayloadBytes) and the headers. UCX's default of 8 KiB carries a third of
/// the bytes per second (docs/transport.md). A segment must fit the receiver's buffer, so both are set together.
constexpr const char* kTcpSegment = "256K";

bool is_set(const char* variable) { return std::getenv(variable) != nullptr; }

bool may_use_tcp(const Setup& setup) {
  const char* own = std::getenv("UCX_TLS");
  return allows(!setup.transports.empty() ? setup.transports : own != nullptr ? own : "all", "tcp");
}

/// Oldest UCX that spreads puts over several connections to a peer.
constexpr unsigned kMajorWithPaths = 1;
constexpr unsigned kMinorWithPaths = 15;

/// Settings for the cards of such a context. UCX's variables override them.
CardSettings settings_for_cards(const Setup& setup, const CardSettings& wanted) {
  CardSettings cards;
  if (!setup.has_cards) return cards;
  if (!is_set("UCX_IB_SL")) cards.service_level = wanted.service_level;
  const bool own_paths = is_set("UCX_IB_NUM_PATHS") || is_set("UCX_MAX_RMA_RAILS") || is_set("UCX_MAX_RMA_LANES");
  if (!own_paths) cards.num_paths = wanted.num_paths;
  return cards;
}

void fill_in_cards(const Library& library, const CardSettings& cards, ucp_config_t* config) {
  if (cards.service_level >= 0) library.config_modify(config, "IB_SL", std::to_string(cards.service_level).c_str());
  if (cards.num_paths <= 0) return;
  const std::string num_paths = std::to_string(cards.num_paths);
  library.config_modify(config, "IB_NUM_PATHS", num_paths.c_str());
  library.config_modify(config, "MAX_RMA_RAILS", num_paths.c_str());
}

/// Applies the setup. Settings that another version of UCX does not have are ignored.
void fill_in(const Library& library, const Setup& setup, ucp_config_t* config) {
  if (!setup.transports.empty()) library.config_modify(config, "TLS", setup.transports.c_str());
  if (!setup.devices.empty()) library.config_modify(config, "NET_DEVICES", setup.devices.c_str());
  if (!is_set("UCX_KEEPALIVE_INTERVAL")) library.config_modify(config, "KEEPALIVE_INTERVAL", kKeepaliveInterval);
  if (may_use_tcp(setup) && !is_set("UCX_TCP_TX_SEG_SIZE") && !is_set("UCX_TCP_RX_SEG_SIZE")) {
    // Names of a transport's own settings omit its prefix; only tcp has these two.
    library.config_modify(config, "TX_SEG_SIZE", kTcpSegment);
    library.config_modify(config, "RX_SEG_SIZE", kTcpSegment);
  }
}

constexpr std::string_view kVariablesHint = "check the UCX_* variables (UCX_LOG_LEVEL=info makes UCX report more)";

/// Descriptors that a context and its worker hold or open for a moment: a base, and more for each network interface.
/// Measured with UCX 1.13 and 1.22: at most 16 for one interface, 5 for each further one.
constexpr std::size_t kDescriptors = 20;
constexpr std::size_t kDescriptorsPerInterface = 6;
/// Queue and buffers of a worker's posix transport: 4.3 MB with UCX 1.13, 5.3 MB with 1.22.
constexpr std::size_t kPosixBytes = std::size_t{8} << 20;
/// Address space that a context and its worker take beyond their memory: 16 MB with UCX 1.13, and the C library's heaps
/// of 64 MB for UCX's thread and the one that drives it, which take what is there and leave UCX nothing.
constexpr std::size_t kAddressSpaceBytes = std::size_t{160} << 20;

Status check_limits(const Setup& setup, const Resources::Params& params) {
  if (Status status = check_descriptors(Resources::num_descriptors(params.scope, params.num_peers)); !status.ok()) {
    return status;
  }
  if (Status status = check_threads(); !status.ok()) return status;
  if (Status status = check_address_space(kAddressSpaceBytes + params.memory_bytes); !status.ok()) return status;
  return setup.shared_memory ? check_shared_memory(kPosixBytes + params.memory_bytes) : Status();
}

/// Replaces UCX's "out of memory" by the cause, if a shared-memory file no longer finds the room that was there before.
Status with_cause(Status status, const Setup& setup, const Resources::Params& params) {
  if (status.ok() || status.code() != ErrorCode::kTransport) return status;
  Status limits = check_limits(setup, params);
  return limits.ok() ? status : limits;
}

}  // namespace

Status check_card_settings(const Library& library, const CardSettings& cards) {
  const bool spreads_puts = std::pair(library.major, library.minor) >= std::pair(kMajorWithPaths, kMinorWithPaths);
  if (cards.num_paths <= 0 || spreads_puts) return {};
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("network engine ucx: GroupOptions::network_paths is {}, and {} puts by one connection; leave "
                  "it 0, or use UCX {}.{} or later",
                  cards.num_paths, library.version, kMajorWithPaths, kMinorWithPaths));
}

Resources::Resources(const Library& library, Setup setup, const Params& params)
    : library_(library),
      setup_(std::move(setup)),
      cards_(settings_for_cards(setup_, params.cards)),
      cards_keep_order_(params.cards_keep_order),
      memory_(params.memory),
      gpu_memory_(params.gpu_memory) {}

std::size_t Resources::num_descriptors(Scope scope, std::size_t num_peers) {
  const std::size_t num_interfaces = scope == Scope::kHost ? 1 : num_network_interfaces();
  return kDescriptors + kDescriptorsPerInterface * num_interfaces + descriptors_of_connections(num_peers);
}

Result<std::unique_ptr<Resources>> Resources::create(const Library& library, const Params& params) {
  Surroundings surroundings = Surroundings::here();
  surroundings.gpu_memory = !params.gpu_memory.empty();
  const std::vector<Setup> setups = setups_for(params.scope, params.devices, surroundings);
  for (const Setup& setup : setups) {
    // Not an error of the setup, which another could hide.
    if (Status status = check_card_settings(library, settings_for_cards(setup, params.cards)); !status.ok()) {
      return status;
    }
    Result<std::unique_ptr<Resources>> resources = create(library, params, setup);
    // Other setups have no cards, and would hide why this one does not reach GPU memory.
    if (resources.ok() || !setup.optional || !params.gpu_memory.empty()) return resources;
  }
  return Status(ErrorCode::kInternal, "network engine ucx: no setup to try; please report this bug");
}

Result<std::unique_ptr<Resources>> Resources::create(const Library& library, const Params& params, const Setup& setup) {
  if (Status status = check_limits(setup, params); !status.ok()) return status;
  std::unique_ptr<Resources> resources(new Resources(library, setup, params));
  Status status = resources->open_context();
  if (status.ok()) status = resources->map_memory(params.memory_bytes);
  if (status.ok()) status = resources->map_gpu_memory();
  if (status.ok()) status = resources->open_worker();
  if (!status.ok()) {
    resources = nullptr;  // releases its resources before the check of free space below
    return with_cause(std::move(status), setup, params);
  }
  return resources;
}

Result<std::unique_ptr<Resources>> Resources::create_receiver(const Resources& of, std::size_t num_peers) {
  const Scope scope = Scope::kNetwork;  // network devices are already chosen in `devices`
  return create(of.library_, {.scope = scope, .num_peers = num_peers},
                {.transports = "tcp", .devices = of.setup_.devices});
}

Status Resources::listen(ucp_am_recv_callback_t receive, void* argument) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = receive;
  handler.arg = argument;
  return ucx_status(library_.worker_set_am_recv_handler(worker_, &handler), "listening for messages");
}

bool Resources::may_receive_puts() const {
  const char* own = std::getenv("UCX_TLS");
  const bool has_segments =
      setup_.shared_memory || (setup_.transports.empty() && own != nullptr && allows(own, "sysv"));
  // UCX retries forever once a range of ports is exhausted.
  const char* range = std::getenv("UCX_TCP_PORT_RANGE");
  const bool has_ports = range == nullptr || std::string_view(range) == "0";
  return !setup_.remote_writes && may_use_tcp(setup_) && has_ports && !(has_segments && mapped_ != nullptr);
}

Resources::~Resources() {
  if (worker_ != nullptr) library_.worker_destroy(worker_);
  if (gpu_mapped_ != nullptr) library_.mem_unmap(context_, gpu_mapped_);
  if (mapped_ != nullptr) library_.mem_unmap(context_, mapped_);
  if (context_ != nullptr) library_.cleanup(context_);
}

Status Resources::open_context() {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t read = library_.config_read(nullptr, nullptr, &config); read != UCS_OK) {
    const Status reason = ucx_status(read, "reading the UCX_* variables", kVariablesHint);
    return Status(ErrorCode::kInvalidArgument, std::string(reason.message()));
  }
  fill_in(library_, setup_, config);
  fill_in_cards(library_, cards_, config);
  // Otherwise versions from 1.16 or so on wait in a fence until all peers have answered. One lane needs no more.
  if (cards_keep_order_ && !is_set("UCX_FENCE_MODE")) library_.config_modify(config, "FENCE_MODE", "weak");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (setup_.remote_writes) params.features |= UCP_FEATURE_RMA;
  params.name = "ferry";
  const ucs_status_t opened = library_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  library_.config_release(config);
  if (opened != UCS_OK) context_ = nullptr;
  return ucx_status(opened, "opening a context", kVariablesHint);
}

Status Resources::map_memory(std::size_t memory_bytes) {
  // Only cards write into memory that UCX did not allocate.
  if (memory_.empty() ? memory_bytes == 0 : !setup_.remote_writes) return {};
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory_.data();
  params.length = memory_.size();
  if (memory_.empty()) {
    // Over shared memory UCX performs puts as stores only into segments that it allocated.
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.length = memory_bytes;
    params.flags = UCP_MEM_MAP_ALLOCATE;
  }
  if (Status status = ucx_status(library_.mem_map(context_, &params, &mapped_), "registering memory",
                                 "a network card needs locked memory: raise its limit (ulimit -l)");
      !status.ok()) {
    mapped_ = nullptr;
    return status;
  }
  if (memory_.empty()) {
    if (Status status = find_allocated(); !status.ok()) return status;
    memory_ = memory_.first(memory_bytes);
  }
  return pack_key(mapped_, &remote_key_);
}

Status Resources::map_gpu_memory() {
  if (gpu_memory_.empty() || !setup_.remote_writes) return {};
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = gpu_memory_.data();
  params.length = gpu_memory_.size();
  params.memory_type = UCS_MEMORY_TYPE_CUDA;
  if (Status status = ucx_status(library_.mem_map(context_, &params, &gpu_mapped_), "registering GPU memory",
                                 "`ferry doctor` shows what GPUDirect needs; or set GroupOptions::ring_memory to host");
      !status.ok()) {
    gpu_mapped_ = nullptr;
    return status;
  }
  return pack_key(gpu_mapped_, &gpu_key_);
}

Status Resources::pack_key(ucp_mem_h mapped, std::vector<std::byte>* key) {
  void* packed = nullptr;
  std::size_t num_bytes = 0;
  if (Status status = ucx_status(library_.rkey_pack(context_, mapped, &packed, &num_bytes), "packing the memory's key");
      !status.ok()) {
    return status;
  }
  const auto* first = static_cast<const std::byte*>(packed);
  key->assign(first, first + num_bytes);
  library_.rkey_buffer_release(packed);
  return {};
}

/// Finds the allocated range: UCX may allocate more than requested.
Status Resources::find_allocated() {
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH;
  const ucs_status_t found = library_.mem_query(mapped_, &attributes);
  if (found == UCS_OK) memory_ = {static_cast<std::byte*>(attributes.address), attributes.length};
  return ucx_status(found, "querying the allocated memory");
}

Status Resources::open_worker() {
  const std::set<int> listening_before = Listeners::all_of_process();
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // the rank's thread and the proxy's use it in turn
  if (Status status =
          ucx_status(library_.worker_create(context_, &params, &worker_), "opening a worker", kVariablesHint);
      !status.ok()) {
    worker_ = nullptr;
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
  listeners_ = Listeners(listening_before, address_);
  return {};
}

}  // namespace ferry::net::ucx

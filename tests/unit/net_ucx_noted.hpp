#ifndef FERRY_TESTS_NET_UCX_NOTED_HPP
#define FERRY_TESTS_NET_UCX_NOTED_HPP

/// A connection over a UCX that only notes its requests, which the test completes in any order: a card that writes into
/// GPU memory is on no machine that runs these tests.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/ucx/connection.hpp"

namespace ferry::test {

/// An operation that UCX was asked for, in flight.
struct Asked {
  std::string what;
  std::uint64_t remote = 0;
  ucp_request_param_t params{};
  void* into = nullptr;  // of a get
};

/// Operations asked for and not yet completed; names of all so far.
struct Notes {
  std::vector<Asked> in_flight;
  std::vector<std::string> names;
  std::vector<std::uint64_t> values;  // of notifies, as the peer would be told
  const char* lanes = "";
};
inline Notes* notes = nullptr;

inline constexpr const char* kOneCard = "# lane[0]: 1:rc_mlx5/mlx5_0:1.0 md[1] -> md[1]/ib/sysdev[255] rma am wireup\n";
inline constexpr const char* kTwoCards =
    "# lane[0]: 1:rc_mlx5/mlx5_0:1.0 md[1] -> md[1]/ib/sysdev[255] rma am wireup\n"
    "# lane[1]: 2:rc_mlx5/mlx5_1:1.0 md[2] -> md[2]/ib/sysdev[255] rma_bw#1\n";

/// Any pointer that is neither null nor one of UCX's errors.
template <typename Handle>
Handle handle() {
  static std::uint64_t object = 0;
  return reinterpret_cast<Handle>(&object);
}

inline ucs_status_ptr_t ask(const char* what, std::uint64_t remote, const ucp_request_param_t* params,
                            void* into = nullptr) {
  notes->in_flight.push_back({what, remote, *params, into});
  notes->names.emplace_back(what);
  return handle<ucs_status_ptr_t>();
}

inline net::ucx::Library noting_library() {
  net::ucx::Library ucx;
  ucx.config_read = [](const char*, const char*, ucp_config_t** config) {
    *config = handle<ucp_config_t*>();
    return UCS_OK;
  };
  ucx.config_modify = [](ucp_config_t*, const char*, const char*) { return UCS_OK; };
  ucx.config_release = [](ucp_config_t*) {};
  ucx.init_version = [](unsigned, unsigned, const ucp_params_t*, const ucp_config_t*, ucp_context_h* context) {
    *context = handle<ucp_context_h>();
    return UCS_OK;
  };
  ucx.cleanup = [](ucp_context_h) {};
  ucx.mem_map = [](ucp_context_h, const ucp_mem_map_params_t*, ucp_mem_h* memory) {
    *memory = handle<ucp_mem_h>();
    return UCS_OK;
  };
  ucx.mem_unmap = [](ucp_context_h, ucp_mem_h) { return UCS_OK; };
  ucx.rkey_pack = [](ucp_context_h, ucp_mem_h, void** packed, std::size_t* num_bytes) {
    *packed = handle<void*>();
    *num_bytes = 1;
    return UCS_OK;
  };
  ucx.rkey_buffer_release = [](void*) {};
  ucx.ep_rkey_unpack = [](ucp_ep_h, const void*, ucp_rkey_h* key) {
    *key = handle<ucp_rkey_h>();
    return UCS_OK;
  };
  ucx.rkey_ptr = [](ucp_rkey_h, std::uint64_t, void**) { return UCS_ERR_UNSUPPORTED; };
  ucx.rkey_destroy = [](ucp_rkey_h) {};
  ucx.worker_create = [](ucp_context_h, const ucp_worker_params_t*, ucp_worker_h* worker) {
    *worker = handle<ucp_worker_h>();
    return UCS_OK;
  };
  ucx.worker_destroy = [](ucp_worker_h) {};
  ucx.worker_fence = [](ucp_worker_h) {
    notes->names.emplace_back("fence");
    return UCS_OK;
  };
  ucx.worker_get_efd = [](ucp_worker_h, int* event_fd) {
    *event_fd = -1;
    return UCS_OK;
  };
  ucx.worker_get_address = [](ucp_worker_h, ucp_address_t** address, std::size_t* num_bytes) {
    *address = handle<ucp_address_t*>();
    *num_bytes = 1;
    return UCS_OK;
  };
  ucx.worker_release_address = [](ucp_worker_h, ucp_address_t*) {};
  ucx.ep_create = [](ucp_worker_h, const ucp_ep_params_t*, ucp_ep_h* endpoint) {
    *endpoint = handle<ucp_ep_h>();
    return UCS_OK;
  };
  ucx.ep_close_nbx = [](ucp_ep_h, const ucp_request_param_t*) -> ucs_status_ptr_t { return nullptr; };
  ucx.ep_print_info = [](ucp_ep_h, std::FILE* file) { std::fputs(notes->lanes, file); };
  ucx.ep_flush_nbx = [](ucp_ep_h, const ucp_request_param_t* params) { return ask("flush", 0, params); };
  ucx.put_nbx = [](ucp_ep_h, const void*, std::size_t, std::uint64_t remote, ucp_rkey_h,
                   const ucp_request_param_t* params) { return ask("put", remote, params); };
  ucx.get_nbx = [](ucp_ep_h, void* into, std::size_t, std::uint64_t remote, ucp_rkey_h,
                   const ucp_request_param_t* params) { return ask("get", remote, params, into); };
  ucx.am_send_nbx = [](ucp_ep_h, unsigned, const void* header, std::size_t header_bytes, const void*,
                       std::size_t num_bytes, const ucp_request_param_t* params) {
    net::ucx::Message message;
    std::memcpy(&message, header, std::min(header_bytes, sizeof message));
    notes->values.push_back(message.kind == net::ucx::MessageKind::kPutNotify ? message.operand : message.value);
    return ask(num_bytes > 0 ? "message with bytes" : "message", 0, params);
  };
  ucx.request_free = [](void*) {};
  ucx.status_string = [](ucs_status_t) { return "noted"; };
  return ucx;
}

class NetUcxNoted : public testing::Test {
 protected:
  NetUcxNoted() {
    notes = &notes_;
    notes_.lanes = kOneCard;
    setenv("UCX_TLS", "rc", 1);
  }
  ~NetUcxNoted() override {
    if (connection_ != nullptr) {
      connection_->shut();
      connection_->release_key();
    }
    resources_ = nullptr;  // before the connection, as in the engine
    unsetenv("UCX_TLS");
  }

  Status open(bool read_back, bool cards_keep_order = false) {
    auto resources =
        net::ucx::Resources::create(library_, {.num_peers = 1, .memory = memory_, .gpu_memory = gpu_memory_});
    if (!resources.ok()) return resources.status();
    resources_ = std::move(*resources);
    Result<net::ucx::Seal> seal = net::ucx::Seal::make({});
    if (!seal.ok()) return seal.status();
    connection_ = std::make_unique<net::ucx::Connection>(*resources_, std::move(*seal), 0, 1, 2);
    net::ucx::Connection::RemoteMemory gpu_memory{
        .key = key_, .base = kGpuBase, .read_back = read_back, .cards_keep_order = cards_keep_order};
    if (is_probed_) gpu_memory.num_ends = 2;
    gpu_memory.probe_word = kProbeWord;
    return connection_->open({.worker = key_}, {.key = key_}, gpu_memory);
  }

  void put_into_gpu(int channel) { connection_->put(channel, net::kGpuOffset, net::kGpuOffset + 64, 64); }
  void put_into_host(int channel) { connection_->put(channel, 0, 64, 64); }
  void notify(int channel, std::uint64_t value = 1) {
    connection_->notify(
        channel,
        {.kind = net::ucx::MessageKind::kNotify, .channel = static_cast<std::uint32_t>(channel), .value = value});
  }

  /// Completes the oldest operation of this kind, as the worker's progress does.
  void complete(std::string_view what, ucs_status_t status = UCS_OK) {
    const auto found = std::ranges::find(notes_.in_flight, what, &Asked::what);
    ASSERT_NE(found, notes_.in_flight.end()) << what << " is not in flight";
    const ucp_request_param_t params = found->params;
    notes_.in_flight.erase(found);
    params.cb.send(handle<void*>(), status, params.user_data);
  }

  /// Names of the operations since the last call, once all that is due is sent.
  std::vector<std::string> take_names() {
    connection_->advance();
    return std::exchange(notes_.names, {});
  }

  std::vector<std::uint64_t> take_values() { return std::exchange(notes_.values, {}); }

  static constexpr std::uint64_t kGpuBase = 1 << 20;
  static constexpr std::uint64_t kProbeWord = 77;

  bool is_probed_ = false;
  Notes notes_;
  net::ucx::Library library_ = noting_library();
  std::vector<std::byte> memory_ = std::vector<std::byte>(2 * net::ucx::kMaxOneMessageBytes);
  std::vector<std::byte> gpu_memory_ = std::vector<std::byte>(256 + net::gpu_probe_bytes(2));
  std::vector<std::byte> key_ = std::vector<std::byte>(1);
  std::unique_ptr<net::ucx::Connection> connection_;
  std::unique_ptr<net::ucx::Resources> resources_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_NET_UCX_NOTED_HPP

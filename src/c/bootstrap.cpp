/// C interface of bootstraps, through which ranks find each other.

#include "ferry/bootstrap.hpp"

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <vector>

#include "c/callback_bootstrap.hpp"
#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

namespace ferry::c {
namespace {

constexpr const char* kNoBootstrap = "the bootstrap is null";
constexpr const char* kNoRoom = "the pointer to the bootstrap is null";

Status create_in_process(std::int32_t num_ranks, ferry_bootstrap** handles) {
  if (handles == nullptr) return invalid("ferry_bootstrap_create_in_process", "the pointer to the bootstraps is null");
  auto bootstraps = create_in_process_bootstraps(num_ranks);
  if (!bootstraps.ok()) return bootstraps.status();
  std::vector<std::unique_ptr<ferry_bootstrap>> made;
  for (auto& bootstrap : *bootstraps) {
    made.push_back(std::make_unique<ferry_bootstrap>());
    made.back()->value = std::move(bootstrap);
  }
  for (std::size_t rank = 0; rank < made.size(); ++rank) handles[rank] = made[rank].release();
  return {};
}

Status connect(const TcpBootstrapOptions& options, ferry_bootstrap** handle) {
  auto made = std::make_unique<ferry_bootstrap>();
  auto bootstrap = create_tcp_bootstrap(options);
  if (!bootstrap.ok()) return bootstrap.status();
  made->value = std::move(*bootstrap);
  *handle = made.release();
  return {};
}

Status create_tcp(const ferry_tcp_options* given, ferry_bootstrap** handle) {
  constexpr const char* kCall = "ferry_bootstrap_create_tcp";
  if (handle == nullptr) return invalid(kCall, kNoRoom);
  ferry_tcp_options read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  if (read.port < 0 || read.port > std::numeric_limits<std::uint16_t>::max()) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}: port is {}, expected 1 to {}", kCall, read.port,
                                                           std::numeric_limits<std::uint16_t>::max()));
  }
  TcpBootstrapOptions options;
  options.rank = read.rank;
  options.num_ranks = read.num_ranks;
  options.host = text_or(read.host, options.host.c_str());
  options.port = static_cast<std::uint16_t>(read.port);
  options.secret = text_or(read.secret, "");
  options.timeout_ns = nonzero_or(read.timeout_ns, options.timeout_ns);
  if (read.listen_fd != 0) options.listen_fd = read.listen_fd;
  return connect(options, handle);
}

Status create_from_environment(std::int64_t timeout_ns, ferry_bootstrap** handle) {
  if (handle == nullptr) return invalid("ferry_bootstrap_create_from_environment", kNoRoom);
  auto options = tcp_bootstrap_options_from_environment();
  if (!options.ok()) return options.status();
  options->timeout_ns = nonzero_or(timeout_ns, options->timeout_ns);
  return connect(*options, handle);
}

Status create_callback(const ferry_callback_options* given, ferry_bootstrap** handle) {
  constexpr const char* kCall = "ferry_bootstrap_create_callback";
  if (handle == nullptr) return invalid(kCall, kNoRoom);
  ferry_callback_options options;
  if (Status status = read_struct(kCall, given, options); !status.ok()) return status;
  if (options.all_gather == nullptr) return invalid(kCall, "all_gather is null");
  if (options.num_ranks < 1 || options.rank < 0 || options.rank >= options.num_ranks) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}: rank is {} of {}, expected 0 to num_ranks - 1", kCall,
                                                           options.rank, options.num_ranks));
  }
  auto made = std::make_unique<ferry_bootstrap>();
  made->value = std::make_shared<CallbackBootstrap>(options);
  *handle = made.release();
  return {};
}

Status gather(ferry_bootstrap* handle, std::span<const std::byte> mine, std::byte* all, std::int64_t timeout_ns) {
  constexpr const char* kCall = "ferry_bootstrap_all_gather";
  if (handle == nullptr) return invalid(kCall, kNoBootstrap);
  if (!mine.empty() && (mine.data() == nullptr || all == nullptr)) return invalid(kCall, "a pointer is null");
  auto messages = handle->value->all_gather(mine, nonzero_or(timeout_ns, kDefaultTimeoutNs));
  if (!messages.ok()) return messages.status();
  for (std::size_t rank = 0; rank < messages->size(); ++rank) {
    if ((*messages)[rank].size() == mine.size()) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: rank {} gave {} bytes and rank {} gave {}, expected the same number on all ranks",
                              kCall, handle->value->rank(), mine.size(), rank, (*messages)[rank].size()),
                  static_cast<int>(rank));
  }
  for (const auto& message : *messages) all = std::ranges::copy(message, all).out;
  return {};
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_bootstrap_create_in_process(int32_t num_ranks, ferry_bootstrap** bootstraps) {
  return guarded([&] { return create_in_process(num_ranks, bootstraps); });
}

ferry_status* ferry_bootstrap_create_tcp(const ferry_tcp_options* options, ferry_bootstrap** bootstrap) {
  return guarded([&] { return create_tcp(options, bootstrap); });
}

ferry_status* ferry_bootstrap_create_from_environment(int64_t timeout_ns, ferry_bootstrap** bootstrap) {
  return guarded([&] { return create_from_environment(timeout_ns, bootstrap); });
}

ferry_status* ferry_bootstrap_create_callback(const ferry_callback_options* options, ferry_bootstrap** bootstrap) {
  return guarded([&] { return create_callback(options, bootstrap); });
}

int32_t ferry_bootstrap_rank(const ferry_bootstrap* bootstrap) {
  return bootstrap == nullptr ? -1 : bootstrap->value->rank();
}

int32_t ferry_bootstrap_num_ranks(const ferry_bootstrap* bootstrap) {
  return bootstrap == nullptr ? 0 : bootstrap->value->num_ranks();
}

ferry_status* ferry_bootstrap_all_gather(ferry_bootstrap* bootstrap, const void* mine, uint64_t num_bytes, void* all,
                                         int64_t timeout_ns) {
  return guarded([&] {
    const std::span bytes(static_cast<const std::byte*>(mine), static_cast<std::size_t>(num_bytes));
    return gather(bootstrap, bytes, static_cast<std::byte*>(all), timeout_ns);
  });
}

void ferry_bootstrap_free(ferry_bootstrap* bootstrap) { delete bootstrap; }

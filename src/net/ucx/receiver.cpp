#include "net/ucx/receiver.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <array>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "net/ucx/limits.hpp"
#include "net/ucx/message.hpp"

namespace ferry::net::ucx {
namespace {

using Clock = std::chrono::steady_clock;

/// Same times as the thread of net::Proxy: a message within the spin time costs no wake-up, and a wake-up lost by UCX
/// costs a second.
constexpr std::chrono::microseconds kSpinTime{20};
constexpr int kLongestSleepMs = 1000;
/// Same as the engine's grace for its own endpoints.
constexpr std::chrono::milliseconds kCloseGrace{500};

}  // namespace

std::size_t Receiver::num_descriptors(std::size_t num_peers) {
  constexpr std::size_t kKinds = 3;  // between workers, and both directions between workers and receivers
  return Resources::num_descriptors(Scope::kNetwork, num_peers) + kKinds * descriptors_of_connections(num_peers);
}

Result<std::unique_ptr<Receiver>> Receiver::create(const Resources& scope, std::size_t num_peers, Calls calls) {
  Result<std::unique_ptr<Resources>> resources = Resources::create_receiver(scope, num_peers);
  if (!resources.ok()) return resources.status();
  if (Status status = (*resources)->listen(calls.receive, calls.argument); !status.ok()) return status;
  std::unique_ptr<Receiver> receiver(new Receiver(std::move(*resources), std::move(calls)));
  if (receiver->stop_fd_.get() < 0) {
    return Status(ErrorCode::kSystem, fmt::format("network engine ucx: no descriptor to wake a thread: {}",
                                                  std::strerror(receiver->stop_fd_.error())));
  }
  return receiver;
}

Status Receiver::expect(std::span<const std::byte> address, int rank) {
  const std::vector<std::byte> address_copy = with_tail(address);
  const ucp_ep_params_t params = endpoint_params(address_copy, on_failed, nullptr);
  ucp_ep_h endpoint = nullptr;
  Status status = ucx_status(resources_->library().ep_create(resources_->worker(), &params, &endpoint),
                             fmt::format("expecting puts of rank {}", rank), {}, rank);
  if (status.ok()) endpoints_.push_back(endpoint);
  return status;
}

/// Does nothing: the connection that sends to the peer reports its loss.
void Receiver::on_failed(void* /*argument*/, ucp_ep_h /*endpoint*/, ucs_status_t /*status*/) {}

Status Receiver::start() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return Status(ErrorCode::kSystem,
                  fmt::format("network engine ucx: cannot start the thread that receives: {}; raise the limit of "
                              "threads (ulimit -u)",
                              error.what()));
  }
  return {};
}

void Receiver::stop() {
  if (thread_.joinable()) {
    stopping_.store(true, std::memory_order_relaxed);
    stop_fd_.signal();
    thread_.join();
  }
  close_endpoints();
}

/// Closes the endpoints. Closing is local work, but UCX does it in steps.
void Receiver::close_endpoints() {
  const Library& library = resources_->library();
  std::vector<void*> requests;
  for (ucp_ep_h endpoint : endpoints_) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* const request = library.ep_close_nbx(endpoint, &params);
    if (UCS_PTR_IS_PTR(request)) requests.push_back(request);
  }
  endpoints_.clear();
  const auto deadline = Clock::now() + kCloseGrace;
  for (void* request : requests) {
    while (library.request_check_status(request) == UCS_INPROGRESS && Clock::now() < deadline) {
      library.worker_progress(resources_->worker());
    }
    library.request_free(request);
  }
}

void Receiver::run() {
  Clock::time_point last_move = Clock::now();
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (!calls_.may_receive()) {
      std::this_thread::yield();
    } else if (resources_->library().worker_progress(resources_->worker()) != 0) {
      last_move = Clock::now();
    } else if (Clock::now() - last_move >= kSpinTime) {
      sleep();
    }
  }
}

void Receiver::sleep() {
  if (resources_->library().worker_arm(resources_->worker()) != UCS_OK) return;
  std::array<pollfd, 2> entries{pollfd{resources_->event_fd(), POLLIN, 0}, pollfd{stop_fd_.get(), POLLIN, 0}};
  (void)poll(entries.data(), entries.size(), kLongestSleepMs);
}

}  // namespace ferry::net::ucx

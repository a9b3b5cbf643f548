/// A rank process is killed: the network reports it to the others, which continue with each other.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <semaphore>

#include "net/proxy.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;
constexpr int kVictim = 2;
constexpr std::int64_t kLongNs = 60 * kNsPerSecond;
constexpr std::size_t kBytes = 100'000;

/// Transports that UCX may choose from.
struct Transports {
  const char* name;
  const char* tls;
};

std::string transports_name(const testing::TestParamInfo<Transports>& info) { return info.param.name; }

template <typename Condition>
bool wait_for(std::binary_semaphore* rung, Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kLongNs);
  while (!condition()) {
    if (!rung->try_acquire_until(deadline)) return condition();
  }
  return true;
}

Status failed(std::string_view what, const Status& status = {}) {
  return Status(ErrorCode::kInternal, fmt::format("{}: {}", what, status.to_string()));
}

Status run_rank(int rank, const Meeting& meeting, const ForkedRank::Checkpoint& checkpoint) {
  auto bootstrap = create_tcp_bootstrap(meeting.options(rank, kNumRanks, kLongNs));
  if (!bootstrap.ok()) return bootstrap.status();
  std::vector<std::byte> memory(kNumRanks * kBytes);
  const net::EngineOptions options{
      .self = rank, .num_peers = kNumRanks, .num_channels = 1, .memory = memory, .timeout_ns = kNsPerSecond};
  const net::EngineFactory* ucx = nullptr;
  for (const net::EngineFactory& factory : net::engine_factories()) {
    if (factory.name == "ucx") ucx = &factory;
  }
  auto engine = ucx->create(options);
  if (!engine.ok()) return engine.status();
  const auto gathered = (*bootstrap)->all_gather((*engine)->address().value(), kLongNs);
  if (!gathered.ok()) return gathered.status();
  std::binary_semaphore rung{0};
  net::Proxy proxy(std::move(*engine), options, [&rung] {
    rung.try_acquire();  // at most one wake-up is kept
    rung.release();
  });
  if (Status status = proxy.start(*gathered); !status.ok()) return status;
  for (int peer = 0; peer < kNumRanks; ++peer) {
    if (peer == rank) continue;
    proxy.put(peer, 0, 0, static_cast<std::size_t>(rank) * kBytes, kBytes);
    proxy.notify(peer, 0, 1);
  }
  for (int peer = 0; peer < kNumRanks; ++peer) {
    if (peer != rank && !wait_for(&rung, [&] { return proxy.received(peer, 0) == 1; })) {
      return failed(fmt::format("nothing arrived from rank {}", peer), proxy.peer_status(peer));
    }
  }
  if (const Status status = (*bootstrap)->all_gather({}, kLongNs).status(); !status.ok()) return status;
  if (rank == kVictim) {
    checkpoint();
    for (;;) pause();
  }
  if (!wait_for(&rung, [&] { return !proxy.peer_status(kVictim).ok(); })) return failed("the loss was not reported");
  const Status loss = proxy.peer_status(kVictim);
  proxy.put(kVictim, 0, 0, 0, kBytes);
  proxy.notify(kVictim, 0, 2);
  const int other = 1 - rank;
  proxy.put(other, 0, 0, 0, kBytes);
  proxy.notify(other, 0, 2);
  if (!wait_for(&rung, [&] { return proxy.received(other, 0) == 2; })) {
    return failed("the survivors do not reach each other", proxy.peer_status(other));
  }
  return loss;
}

class NetLostProcess : public testing::TestWithParam<Transports> {};

TEST_P(NetLostProcess, IsReportedToTheOthersWhichContinue) {
  const Meeting meeting = Meeting::prepare();
  std::vector<std::unique_ptr<ForkedRank>> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.push_back(std::make_unique<ForkedRank>([&, rank](const ForkedRank::Checkpoint& checkpoint) {
      if (rank != 0) close(meeting.listen_fd);
      if (GetParam().tls != nullptr) setenv("UCX_TLS", GetParam().tls, 1);
      // Settings for shared memory from docs/transport.md.
      setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
      setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
      return run_rank(rank, meeting, checkpoint);
    }));
  }
  close(meeting.listen_fd);
  ranks[kVictim]->await_checkpoint();
  // Kills and reaps the process: with shared memory UCX asks the system, for which an unreaped process still exists.
  ranks[kVictim] = nullptr;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (rank == kVictim) continue;
    const Status status = ranks[static_cast<std::size_t>(rank)]->result();
    EXPECT_EQ(status.code(), ErrorCode::kPeerLost) << "rank " << rank << ": " << status.to_string();
    EXPECT_EQ(status.peer(), kVictim) << "rank " << rank << ": " << status.to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, NetLostProcess,
                         testing::Values(Transports{"chosen_by_ucx", nullptr}, Transports{"tcp", "tcp"},
                                         Transports{"shared_memory", "posix,sysv,cma,self"}),
                         transports_name);

}  // namespace
}  // namespace ferry::test

/// Unauthenticated connections to the bootstrap's port (strangers) do not prevent the group from forming.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "bootstrap/frame.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

template <typename Case>
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

constexpr std::int64_t kTimeoutNs = 60 * kNsPerSecond;
constexpr int kNumRanks = 3;

/// Forms a group and gathers once.
Status meet(const TcpBootstrapOptions& options) {
  auto bootstrap = create_tcp_bootstrap(options);
  if (!bootstrap.ok()) return bootstrap.status();
  const auto gathered = (*bootstrap)->all_gather(bytes_of(std::to_string(options.rank)), kTimeoutNs);
  if (!gathered.ok()) return gathered.status();
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    if (text_of((*gathered)[static_cast<std::size_t>(rank)]) != std::to_string(rank)) {
      return Status(ErrorCode::kInternal, "a gathered message differs from the one its rank sent");
    }
  }
  return {};
}

struct StrangerKind {
  const char* name;
  std::function<void(const UniqueFd&)> behave;
};

std::string header_text(bootstrap::FrameType type, std::uint32_t length) {
  const bootstrap::HeaderBytes header = bootstrap::encode_header({type, length});
  return text_of({header.begin(), header.end()});
}

class Stranger : public testing::TestWithParam<StrangerKind> {};

TEST_P(Stranger, DoesNotPreventTheGroupFromForming) {
  const Meeting meeting = Meeting::prepare();
  // All strangers wait in the backlog before rank 0 starts, and stay connected until the group has formed.
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 10; ++i) {
    strangers.push_back(connect_stranger(meeting.port));
    ASSERT_TRUE(strangers.back().valid());
    GetParam().behave(strangers.back());
  }
  const auto statuses =
      run_threads(kNumRanks, [&](int rank) { return meet(meeting.options(rank, kNumRanks, kTimeoutNs)); });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  // Rank 0 has left and closed the connections of all strangers.
  for (const UniqueFd& stranger : strangers) await_close(stranger);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Stranger,
    testing::Values(
        StrangerKind{"silent", [](const auto&) {}},
        StrangerKind{"garbage", [](const auto& fd) { send_text(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); }},
        StrangerKind{"much_garbage", [](const auto& fd) { send_text(fd, std::string(100'000, '\xff')); }},
        StrangerKind{"one_byte", [](const auto& fd) { send_text(fd, "F"); }},
        StrangerKind{"half_a_hello",
                     [](const auto& fd) {
                       send_text(fd, header_text(bootstrap::FrameType::kHello, bootstrap::kHelloBytes) +
                                         std::string(bootstrap::kHelloBytes / 2, 'x'));
                     }},
        StrangerKind{"huge_length",
                     [](const auto& fd) { send_text(fd, header_text(bootstrap::FrameType::kHello, UINT32_MAX)); }},
        StrangerKind{"not_a_hello",
                     [](const auto& fd) { send_text(fd, header_text(bootstrap::FrameType::kMessage, 1 << 20)); }},
        StrangerKind{"hello_without_proof",
                     [](const auto& fd) {
                       send_text(fd, header_text(bootstrap::FrameType::kHello, bootstrap::kHelloBytes) +
                                         std::string(bootstrap::kHelloBytes, '1'));
                     }}),
    case_name<StrangerKind>);

TEST(Strangers, GarbageAndWrongProofsAreRejectedWhileTheGroupForms) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(kNumRanks, [&](int thread) {
    if (thread < kNumRanks - 1) return meet(meeting.options(thread, kNumRanks, kTimeoutNs));
    // The last rank connects only after both strangers were rejected, so rank 0 rejects them without it.
    const UniqueFd garbage = connect_stranger(meeting.port);
    send_text(garbage, "SSH-2.0-x\r\n\r\n");
    await_close(garbage);
    TcpBootstrapOptions impostor = meeting.options(thread, kNumRanks, kNsPerSecond / 2);
    impostor.secret = "a guess";
    const Status refused = create_tcp_bootstrap(impostor).status();
    if (refused.code() != ErrorCode::kTimeout) return Status(ErrorCode::kInternal, "the impostor was not refused");
    return meet(meeting.options(thread, kNumRanks, kTimeoutNs));
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Strangers, SilentOneIsClosedBeforeTheGroupsDeadline) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(2, [&](int rank) {
    if (rank == 0) return meet(meeting.options(0, 2, 4 * kNsPerSecond));
    // Rank 1 connects after rank 0 has closed this connection; the group is still forming.
    const UniqueFd silent = connect_stranger(meeting.port);
    await_close(silent);
    return meet(meeting.options(1, 2, kTimeoutNs));
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

/// Holds `count` silent connections until it is killed.
Status hold_connections(std::uint16_t port, std::size_t count, const ForkedRank::Checkpoint& all_connected) {
  rlimit limit{};
  (void)getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<UniqueFd> held;
  while (held.size() < count) {
    held.push_back(connect_stranger(port));
    if (!held.back().valid()) return Status(ErrorCode::kSystem, "a stranger could not connect");
  }
  all_connected();
  for (;;) pause();
}

TEST(Strangers, AThousandAtOnceDoNotPreventTheGroupFromForming) {
  const Meeting meeting = Meeting::prepare();
  // The kernel queues connections, so that all of them exist before rank 0 starts.
  ForkedRank crowd(
      [&](const ForkedRank::Checkpoint& checkpoint) { return hold_connections(meeting.port, 1000, checkpoint); });
  crowd.await_checkpoint();
  const auto statuses =
      run_threads(kNumRanks, [&](int rank) { return meet(meeting.options(rank, kNumRanks, kTimeoutNs)); });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Strangers, RunningOutOfDescriptorsDoesNotPreventTheGroupFromForming) {
  const Meeting meeting = Meeting::prepare();
  ForkedRank root([&](const ForkedRank::Checkpoint&) {
    std::size_t num_open = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++num_open;
    // Enough for the two other ranks and very few strangers. (The count includes the directory that was opened.)
    rlimit limit{};
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = num_open + 4;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    return meet(meeting.options(0, kNumRanks, kTimeoutNs));
  });
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 50; ++i) strangers.push_back(connect_stranger(meeting.port));
  const auto statuses =
      run_threads(kNumRanks - 1, [&](int thread) { return meet(meeting.options(thread + 1, kNumRanks, kTimeoutNs)); });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  const Status root_status = root.result();
  EXPECT_TRUE(root_status.ok()) << root_status.to_string();
  close(meeting.listen_fd);
}

}  // namespace
}  // namespace ferry::test

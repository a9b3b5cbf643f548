/// Connections to an end of the UCX engine: their origin, their transport, and events while they form.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "support/bootstrap_ranks.hpp"
#include "support/net_ends.hpp"
#include "unit/net_ucx_process.hpp"

namespace ferry::test {
namespace {

using testing::HasSubstr;

/// Addresses at which this process listens for IPv4 connections.
std::vector<sockaddr_in> listening_addresses() {
  std::vector<sockaddr_in> addresses;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    socklen_t num_bytes = sizeof listens;
    sockaddr_storage address{};
    socklen_t address_bytes = sizeof address;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &num_bytes) != 0 || listens == 0) continue;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &address_bytes) != 0) continue;
    if (address.ss_family == AF_INET) addresses.push_back(reinterpret_cast<const sockaddr_in&>(address));
  }
  return addresses;
}

/// Connects as any process could. Returns an invalid descriptor if there is no answer in time.
UniqueFd try_to_connect(const sockaddr_in& address, int timeout_ms) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  (void)connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  pollfd writable{fd.get(), POLLOUT, 0};
  int error = 1;
  socklen_t num_bytes = sizeof error;
  const bool connected = poll(&writable, 1, timeout_ms) == 1 &&
                         getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &num_bytes) == 0 && error == 0;
  return connected ? std::move(fd) : UniqueFd();
}

TEST(NetUcx, PeersOfThisHostStoreIntoMemoryAndListenOnTheLoopbackInterfaceAlone) {
  const Status status = in_fresh_process([] {
    unsetenv("UCX_TLS");
    NetEnds ends("ucx", {.engine_allocates = true, .hosts = {7, 7}});
    ends.connect();
    ends[0].engine->notify(1, 0, 1);
    if (!ends.poll_until([&] { return ends[1].highest(0, 0) == 1; })) return Status(ErrorCode::kTimeout, "no message");
    const std::string path = ends[0].engine->paths().at(0).description;
    if (!path.starts_with("memory (puts)")) return Status(ErrorCode::kInternal, path);
    for (const sockaddr_in& address : listening_addresses()) {
      if (address.sin_addr.s_addr != htonl(INADDR_LOOPBACK))
        return Status(ErrorCode::kInternal, "it listens on other interfaces");
    }
    return Status();
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(NetUcx, OnceAllPeersHaveConnectedNoOtherCan) {
  constexpr std::size_t kBytes = 100'000;
  for (const int one_case : {0, 1, 2, 3}) {
    const bool of_one_host = one_case % 2 == 0;
    const char* const engine = kUcxEngines[static_cast<std::size_t>(one_case / 2)];
    const Status status = in_fresh_process([of_one_host, engine] {
      setenv("UCX_TLS", "tcp", 1);
      NetEnds ends(engine, {.num_ends = 3,
                            .memory_bytes = kBytes,
                            .hosts = of_one_host ? std::vector<int>{7, 7, 7} : std::vector<int>{}});
      const std::vector<sockaddr_in> addresses = listening_addresses();
      if (addresses.empty()) return Status(ErrorCode::kInternal, "it listens on no address");
      // In a process of its own: a connection from this process would count as a peer's.
      ForkedRank stranger([&addresses](const ForkedRank::Checkpoint& connected) {
        std::vector<UniqueFd> held;
        for (const sockaddr_in& address : addresses) held.push_back(try_to_connect(address, 10'000));
        connected();
        for (const UniqueFd& fd : held) {
          pollfd readable{fd.get(), POLLIN, 0};
          if (!fd.valid() || poll(&readable, 1, 20'000) != 1) return Status(ErrorCode::kInternal, "it was not ended");
        }
        for (const sockaddr_in& address : addresses) {
          if (try_to_connect(address, 50).valid()) return Status(ErrorCode::kInternal, "a stranger can connect");
        }
        return Status();
      });
      stranger.await_checkpoint();
      ends.connect();
      std::atomic<bool> over{false};
      Status end;
      std::thread waiter([&] {
        end = stranger.result();
        over = true;
      });
      const bool ended = ends.poll_until([&] { return over.load(); });
      waiter.join();
      if (!ended || !end.ok()) return end;
      for (int from = 0; from < ends.size(); ++from) {
        const int to = (from + 1) % ends.size();
        ends[from].engine->put(to, 0, 0, 0, kBytes);
        ends[from].engine->notify(to, 0, 1);
        if (!ends.poll_until([&] { return ends[to].highest(from, 0) == 1; })) {
          return Status(ErrorCode::kTimeout, "peers do not reach each other any more");
        }
      }
      return Status();
    });
    EXPECT_TRUE(status.ok()) << engine << ", one host " << of_one_host << ": " << status.to_string();
  }
}

TEST(NetUcx, LargePutsComeByReceiversWhereTheyAreMessagesOverTcpAlone) {
  struct Case {
    const char* transports;
    const char* ports;  // may be null
    bool expected;
  };
  for (const Case& one : {Case{"tcp", nullptr, true}, Case{"posix,tcp", nullptr, false}, Case{"tcp", "0", true},
                          Case{"tcp", "30000-30999", false}}) {
    const Status status = in_fresh_process([&one] {
      setenv("UCX_TLS", one.transports, 1);
      setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
      if (one.ports != nullptr) setenv("UCX_TCP_PORT_RANGE", one.ports, 1);
      NetEnds ends("ucx_with_receivers", {.memory_bytes = 1 << 20});
      ends.connect();
      ends[0].engine->put(1, 0, 0, 0, 1 << 20);
      ends[0].engine->notify(1, 0, 1);
      if (!ends.poll_until([&] { return ends[1].highest(0, 0) == 1; })) return Status(ErrorCode::kTimeout, "no put");
      const std::string path = ends[0].engine->paths().at(0).description;
      const bool found = path.find("by a receiver") != std::string::npos;
      return found == one.expected ? Status() : Status(ErrorCode::kInternal, path);
    });
    EXPECT_TRUE(status.ok()) << one.transports << ", ports " << (one.ports == nullptr ? "any" : one.ports) << ": "
                             << status.to_string();
  }
}

/// Both ends send at once: an end that held back messages because an earlier large put is missing would hold back the
/// puts that the other end is missing.
TEST(NetUcx, ManySmallMessagesMayOvertakeLargePuts) {
  constexpr int kNumPuts = 40;
  constexpr std::size_t kBytes = 128 << 10;
  constexpr std::uint64_t kNumNotifies = 36'000;
  NetEnds ends("ucx_with_receivers", {.num_channels = 2, .memory_bytes = 2 * kBytes});
  ends.connect();
  for (int from : {0, 1}) {
    for (int i = 0; i < kNumPuts; ++i) ends[from].engine->put(1 - from, 0, kBytes, 0, kBytes);
    for (std::uint64_t value = 1; value <= kNumNotifies; ++value) ends[from].engine->notify(1 - from, 1, value);
  }
  EXPECT_TRUE(ends.poll_until([&] {
    return !ends[0].heard[{1, 1}].empty() && ends[0].heard[{1, 1}].back() == kNumNotifies &&
           !ends[1].heard[{0, 1}].empty() && ends[1].heard[{0, 1}].back() == kNumNotifies;
  }));
  EXPECT_TRUE(ends[0].lost.empty() && ends[1].lost.empty());
}

/// A peer may still be choosing between two sockets, and must not close a socket that the leaving end has not named:
/// that end would wait for the peer's farewell until its distant deadline.
TEST(NetUcx, AnEndThatLeavesAsSoonAsItHasConnectedIsAnswered) {
  constexpr int kNumRounds = 40;
  constexpr std::int64_t kAnHourNs = 3'600'000'000'000;
  for (const char* engine : kUcxEngines) {
    for (int round = 0; round < kNumRounds; ++round) {
      NetEnds ends(engine, {.num_channels = 2, .timeout_ns = kAnHourNs});
      ends.connect();
      std::atomic<bool> over{false};
      std::jthread stays([&] {
        while (!over) ends[1].engine->poll();
      });
      ends[0].engine->notify(1, 0, 1);
      ends[0].engine->close();
      over = true;
      stays.join();
      ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
      EXPECT_EQ(ends[1].lost[0].code(), ErrorCode::kPeerLost) << ends[1].lost[0].to_string();
      EXPECT_EQ(ends[1].highest(0, 0), 1U);
    }
  }
}

TEST(NetUcx, ImpostorsWithoutAPeersKeyAreNotHeard) {
  NetEnds ends("ucx", {.memory_bytes = 4096});
  NetEnds impostors("ucx", {.memory_bytes = 4096, .timeout_ns = 100'000'000});
  std::vector<net::Blob> published = ends.addresses();
  ends.connect();
  published[1] = impostors.addresses()[1];
  ASSERT_TRUE(impostors.connect(1, published).ok());
  std::ranges::fill(impostors[1].memory, std::byte{0x55});
  impostors[1].engine->put(0, 0, 0, 0, 4096);
  impostors[1].engine->notify(0, 0, 7);
  ends[1].engine->notify(0, 0, 1);
  EXPECT_TRUE(ends.poll_until([&] {
    impostors.poll();
    return ends[0].highest(1, 0) == 1;
  }));
  for (int round = 0; round < 1000; ++round) {
    ends.poll();
    impostors.poll();
  }
  EXPECT_EQ(ends[0].highest(1, 0), 1U);
  EXPECT_TRUE(std::ranges::all_of(ends[0].memory, [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_TRUE(ends[0].lost.empty());
}

TEST(NetUcx, EndsThatDisagreeAboutHostsAreRefused) {
  NetEnds ends("ucx", {.num_ends = 3, .hosts = {0, 0, 1}});
  std::vector<net::Blob> addresses = ends.addresses();
  NetEnds others("ucx", {.num_ends = 3, .hosts = {0, 1, 2}});
  addresses[1] = others.addresses()[1];
  const Status status = ends.connect(0, addresses);
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_EQ(status.peer(), 1);
  EXPECT_THAT(status.message(), HasSubstr("does not expect this rank on its host"));
}

}  // namespace
}  // namespace ferry::test

/// Properties of the UCX engine alone: its effect on the process that loads it, and UCX's variables.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
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

#include "net/ucx/engine.hpp"
#include "net/ucx/paths.hpp"
#include "net/ucx/setup.hpp"
#include "support/bootstrap_ranks.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

/// In a process of its own, into which UCX has not been loaded yet.
Status in_fresh_process(const std::function<Status()>& body) {
  ForkedRank process([&body](const ForkedRank::Checkpoint&) { return body(); });
  return process.result();
}

/// Ends that receive by one thread, and by two.
constexpr std::array<const char*, 2> kEngines{"ucx", "ucx_with_receivers"};

Status create_status(std::string_view engine = "ucx") {
  std::vector<std::byte> memory(4096);
  net::EngineOptions options{.self = 0, .num_peers = 2, .num_channels = 1, .memory = memory};
  options.may_start_receiver = has_receivers(engine);
  return net_engine(engine).create(options).status();
}

/// Where this process listens for IPv4 connections.
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

/// Connects as any process could. Invalid where nobody answers within the time.
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

Status lose_a_peer() {
  NetEnds ends("ucx", {});
  ends.connect();
  ends[0].engine->notify(1, 0, 1);
  if (!ends.poll_until([&] { return ends[1].highest(0, 0) == 1; })) return Status(ErrorCode::kInternal, "no notify");
  ends[0].engine = nullptr;
  if (!ends.poll_until([&] { return ends[1].lost.contains(0); })) return Status(ErrorCode::kInternal, "not lost");
  return {};
}

TEST(NetUcx, LeavesSignalHandlersAlone) {
  const Status status = in_fresh_process([] {
    constexpr std::array<int, 6> kSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGHUP, SIGALRM};
    std::array<struct sigaction, kSignals.size()> before{};
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &before[i]);
    if (Status created = create_status(); !created.ok()) return created;
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction after {};
      sigaction(kSignals[i], nullptr, &after);
      if (after.sa_handler != before[i].sa_handler) {
        return Status(ErrorCode::kInternal, "another handler for signal " + std::to_string(kSignals[i]));
      }
    }
    return Status();
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(NetUcx, PrintsNothingWhenAPeerIsLost) {
  const Status status = in_fresh_process([] {
    unsetenv("UCX_LOG_LEVEL");
    const int file = memfd_create("printed", 0);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    if (Status lost = lose_a_peer(); !lost.ok()) return lost;
    std::string printed(4096, '\0');
    const ssize_t num_bytes = pread(file, printed.data(), printed.size(), 0);
    if (num_bytes <= 0) return Status();
    printed.resize(static_cast<std::size_t>(num_bytes));
    return Status(ErrorCode::kInternal, "it printed: " + printed);
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

/// Loads it as another library of the process would, and says where it is.
std::string load_as_others_do() {
  void* library = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  link_map* map = nullptr;
  return library != nullptr && dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

TEST(NetUcx, IsLoadedFromTheFolderOrFileThatItsVariableNames) {
  const Status found = in_fresh_process([] { return Status(ErrorCode::kInternal, load_as_others_do()); });
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("ferry_ucx_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const std::filesystem::path link = folder / "libucp.so.0";
  std::filesystem::create_symlink(found.message(), link);
  for (const std::filesystem::path& named : {folder, link}) {
    const Status status = in_fresh_process([&] {
      setenv("FERRY_UCX_LIBRARY", named.c_str(), 1);
      if (Status created = create_status(); !created.ok()) return created;
      const std::string used = net::ucx::library_in_use();
      return used.ends_with(link.string()) ? Status() : Status(ErrorCode::kInternal, used);
    });
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  std::filesystem::remove_all(folder);
}

TEST(NetUcx, ALibraryThatIsNotThereIsNamed) {
  const Status status = in_fresh_process([] {
    setenv("FERRY_UCX_LIBRARY", "/nonesuch", 1);
    return create_status();
  });
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_THAT(status.message(), AllOf(HasSubstr("/nonesuch"), HasSubstr("FERRY_UCX_LIBRARY")));
}

TEST(NetUcx, ASecondUcxInAProcessIsRefused) {
  const Status status = in_fresh_process([] {
    setenv("FERRY_UCX_LIBRARY", "/nonesuch/libucp.so.0", 1);
    (void)load_as_others_do();
    return create_status();
  });
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_THAT(status.message(), HasSubstr("this process has"));
}

TEST(NetUcx, VariablesThatLeaveNoTransportAreATypedError) {
  const Status status = in_fresh_process([] {
    setenv("UCX_TLS", "nosuchtransport", 1);
    return create_status();
  });
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_THAT(status.message(), HasSubstr("UCX_*"));
}

TEST(NetUcx, VariablesThatUcxRefusesAreATypedError) {
  const Status status = in_fresh_process([] {
    setenv("UCX_KEEPALIVE_INTERVAL", "soon", 1);
    return create_status();
  });
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
  EXPECT_THAT(status.message(), HasSubstr("UCX_*"));
}

TEST(NetUcx, TransportsThatCannotDetectALossAreRefusedAtConnect) {
  const Status status = in_fresh_process([] {
    setenv("UCX_TLS", "posix,sysv,self", 1);
    NetEnds ends("ucx", {.timeout_ns = 0});
    return ends.connect(0, ends.addresses());
  });
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_EQ(status.peer(), 1);
  EXPECT_THAT(status.message(), HasSubstr("UCX_POSIX_ERROR_HANDLING=y"));
}

TEST(NetUcx, GpuMemoryNeedsACardTowardsEachPeer) {
  for (const char* transports : {"tcp", "posix,sysv,self"}) {
    const Status status = in_fresh_process([transports] {
      setenv("UCX_TLS", transports, 1);
      setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
      setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
      NetEnds ends("ucx", {.gpu_bytes = 4096, .timeout_ns = 0});
      return ends.connect(0, ends.addresses());
    });
    EXPECT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
    EXPECT_EQ(status.peer(), 1);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 1 is reached by "), HasSubstr("set GroupOptions::ring_memory to host")));
  }
}

TEST(NetUcx, EndsWithOtherAmountsOfGpuMemoryAreRefused) {
  const Status status = in_fresh_process([] {
    setenv("UCX_TLS", "tcp", 1);
    NetEnds with("ucx", {.gpu_bytes = 4096, .timeout_ns = 0});
    NetEnds without("ucx", {.timeout_ns = 0});
    return without.connect(0, {without.addresses()[0], with.addresses()[1]});
  });
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_EQ(status.peer(), 1);
  EXPECT_THAT(status.message(), HasSubstr("has 4096 bytes of GPU memory for rings, expected 0"));
}

TEST(NetUcx, SharedMemoryWorksToo) {
  const Status status = in_fresh_process([] {
    setenv("UCX_TLS", "posix,sysv,cma,self", 1);
    setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
    setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
    return lose_a_peer();
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(NetUcx, PathsReportWhetherTheyAreInMemory) {
  for (const bool in_memory : {true, false}) {
    const Status status = in_fresh_process([in_memory] {
      setenv("UCX_TLS", in_memory ? "posix,sysv,self" : "tcp", 1);
      setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
      setenv("UCX_SYSV_ERROR_HANDLING", "y", 1);
      NetEnds ends("ucx", {});
      ends.connect();
      ends[0].engine->notify(1, 0, 1);
      if (!ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }))
        return Status(ErrorCode::kTimeout, "no message");
      const net::Path path = ends[0].engine->paths().at(0);
      return path.in_memory == in_memory ? Status() : Status(ErrorCode::kInternal, path.description);
    });
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
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
        return Status(ErrorCode::kInternal, "it listens to others");
    }
    return Status();
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(NetUcx, OnceAllPeersHaveConnectedNobodyElseIsAndCan) {
  constexpr std::size_t kBytes = 100'000;
  for (const int one_case : {0, 1, 2, 3}) {
    const bool of_one_host = one_case % 2 == 0;
    const char* const engine = kEngines[static_cast<std::size_t>(one_case / 2)];
    const Status status = in_fresh_process([of_one_host, engine] {
      setenv("UCX_TLS", "tcp", 1);
      NetEnds ends(engine, {.num_ends = 3,
                            .memory_bytes = kBytes,
                            .hosts = of_one_host ? std::vector<int>{7, 7, 7} : std::vector<int>{}});
      const std::vector<sockaddr_in> addresses = listening_addresses();
      if (addresses.empty()) return Status(ErrorCode::kInternal, "it listens nowhere");
      // In a process of its own: what this one connects counts as a peer's.
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

/// Both ends at once: an end that held back what comes, because a large put before it is missing, would hold back the
/// puts that the other one is missing.
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

/// A peer may still be choosing between two sockets then, and must not end those that the end that leaves has not
/// named: it would wait for its farewell until the deadline, which is far away.
TEST(NetUcx, AnEndThatLeavesAsSoonAsItHasConnectedIsAnswered) {
  constexpr int kNumRounds = 40;
  constexpr std::int64_t kAnHourNs = 3'600'000'000'000;
  for (const char* engine : kEngines) {
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

TEST(NetUcx, TooFewDescriptorsAreATypedErrorThatNamesTheLimit) {
  // From none to as many as are enough: UCX ends the process where it finds out by itself.
  for (const char* engine : kEngines) {
    bool created = false;
    // A receiver is left out where there are too few for it.
    for (rlim_t limit = 8; limit < 256; limit += 4) {
      const Status status = in_fresh_process([limit, engine] {
        const rlimit descriptors{limit, limit};
        setrlimit(RLIMIT_NOFILE, &descriptors);
        return create_status(engine);
      });
      if (created || status.ok()) {
        created = true;
        EXPECT_TRUE(status.ok()) << engine << ' ' << limit << ": " << status.to_string();
        continue;
      }
      EXPECT_EQ(status.code(), ErrorCode::kSystem) << limit << ": " << status.to_string();
      EXPECT_THAT(status.message(), HasSubstr("this process may have " + std::to_string(limit)));
      EXPECT_THAT(status.message(), HasSubstr("ulimit -n"));
    }
    EXPECT_TRUE(created) << engine;
  }
}

TEST(NetUcx, DescriptorsThatRunOutWhileConnectingEndNoProcess) {
  // For none, one, two or all three of the ends, which share what this process may have.
  constexpr std::array<rlim_t, 2> kEnough{40, 120};  // by engine
  constexpr std::array<rlim_t, 13> kNumLeft{0, 4, 8, 12, 14, 18, 22, 26, 40, 56, 72, 96, 120};
  for (std::size_t one_case = 0; one_case < 2 * kNumLeft.size(); ++one_case) {
    const rlim_t num_left = kNumLeft[one_case / 2];
    const char* const engine = kEngines[one_case % 2];
    const bool may_fail = num_left < kEnough[one_case % 2];
    const Status status = in_fresh_process([num_left, engine, may_fail] {
      NetEnds ends(engine, {.num_ends = 3, .timeout_ns = 100'000'000});
      const std::vector<net::Blob> addresses = ends.addresses();
      const int next = dup(0);
      close(next);
      const rlim_t limit = static_cast<rlim_t>(next) + num_left;
      const rlimit descriptors{limit, limit};
      setrlimit(RLIMIT_NOFILE, &descriptors);
      for (int end = 0; end < ends.size(); ++end) {
        const Status connected = ends.connect(end, addresses);
        const bool too_few = may_fail && connected.code() == ErrorCode::kSystem;
        if (!connected.ok() && !too_few) return connected;
      }
      for (int from = 0; from < ends.size(); ++from) {
        for (int to = 0; to < ends.size(); ++to) {
          if (to != from) ends[from].engine->notify(to, 0, 1);
        }
      }
      for (int round = 0; round < 200; ++round) {
        if (!ends.poll()) usleep(100);
      }
      return Status();
    });
    EXPECT_TRUE(status.ok()) << engine << ' ' << num_left << ": " << status.to_string();
  }
}

TEST(NetUcx, NoRoomForSharedMemoryIsATypedErrorThatNamesTheFolder) {
  const Status status = in_fresh_process([] {
    setenv("UCX_TLS", "posix", 1);
    setenv("UCX_POSIX_DIR", "/proc", 1);  // a file system without room, on any machine
    return create_status();
  });
  EXPECT_EQ(status.code(), ErrorCode::kSystem) << status.to_string();
  EXPECT_THAT(status.message(), HasSubstr("/proc"));
  EXPECT_THAT(status.message(), HasSubstr("needs"));
}

TEST(NetUcx, WithoutRoomForSharedMemoryPeersOfThisHostTalkOverTcp) {
  const Status status = in_fresh_process([] {
    unsetenv("UCX_TLS");
    setenv("UCX_POSIX_DIR", "/proc", 1);
    NetEnds ends("ucx", {.engine_allocates = true, .hosts = {7, 7}});
    ends.connect();
    ends[0].engine->put(1, 0, 0, 0, 1000);
    ends[0].engine->notify(1, 0, 1);
    if (!ends.poll_until([&] { return ends[1].highest(0, 0) == 1; })) return Status(ErrorCode::kTimeout, "no message");
    const std::string path = ends[0].engine->paths().at(0).description;
    return path.starts_with("tcp/") ? Status() : Status(ErrorCode::kInternal, path);
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(NetUcx, SetupsFollowTheEnvironment) {
  using net::ucx::Scope;
  using net::ucx::setups_for;
  net::ucx::Surroundings surroundings{.loopback = "lo"};
  EXPECT_EQ(setups_for(Scope::kHost, "eth1", surroundings).back().devices, "lo");
  EXPECT_EQ(setups_for(Scope::kHost, "eth1", surroundings).back().transports, "tcp");
  std::vector<net::ucx::Setup> network = setups_for(Scope::kNetwork, "eth1", surroundings);
  ASSERT_EQ(network.size(), 1U);
  EXPECT_EQ(network[0].devices, "eth1");
  EXPECT_FALSE(network[0].remote_writes);
  surroundings.has_infiniband = true;
  network = setups_for(Scope::kNetwork, "", surroundings);
  ASSERT_EQ(network.size(), 2U);
  EXPECT_EQ(network[0].transports, "ib");
  EXPECT_TRUE(network[0].remote_writes && network[0].optional);
  EXPECT_FALSE(network[1].remote_writes || network[1].optional);
  surroundings.gpu_memory = true;
  EXPECT_EQ(setups_for(Scope::kNetwork, "", surroundings)[0].transports, "ib,cuda");
  surroundings.transports = "rc,cuda_copy";
  EXPECT_TRUE(setups_for(Scope::kNetwork, "", surroundings)[0].remote_writes);
  surroundings.gpu_memory = false;
  surroundings.transports = "rc,ud";
  surroundings.devices = "mlx5_0:1";
  network = setups_for(Scope::kNetwork, "eth1", surroundings);
  ASSERT_EQ(network.size(), 1U);
  EXPECT_EQ(network[0].transports, "");
  EXPECT_EQ(network[0].devices, "");
  EXPECT_TRUE(network[0].remote_writes);
  EXPECT_EQ(setups_for(Scope::kHost, "", surroundings).back().transports, "tcp");
  surroundings.transports = "rc,tcp";
  EXPECT_FALSE(setups_for(Scope::kNetwork, "", surroundings)[0].remote_writes);
  EXPECT_EQ(setups_for(Scope::kHost, "", surroundings)[0].transports, "");
  EXPECT_EQ(setups_for(Scope::kHost, "", surroundings)[0].devices, "lo");
}

TEST(NetUcx, ListsOfTransportsAllowOrExclude) {
  using net::ucx::allows;
  EXPECT_TRUE(allows("tcp,posix", "posix") && allows("sm", "posix") && allows("all", "tcp") && allows("^tcp", "posix"));
  EXPECT_FALSE(allows("tcp", "posix") || allows("^sm,tcp", "posix") || allows("", "tcp") || allows("tcpx", "tcp"));
}

TEST(NetUcx, LanesAreDescribedByWhatTheyAreUsedFor) {
  constexpr std::string_view kText =
      "#\n# UCP endpoint \n#\n#               peer: <no debug data>\n"
      "#                 lane[0]:  1:rc_mlx5/mlx5_0:1.0 md[1]    -> md[1]/ib/sysdev[255] rma am am_bw#0 wireup\n"
      "#                 lane[1]:  2:tcp/eth0.0 md[2]    -> md[2]/tcp/sysdev[255] am keepalive\n"
      "#                 lane[2]:  3:cma/memory md[3]    -> md[3]/cma/sysdev[255] rma_bw#0\n#\n"
      "#                  rma_bw: mds rndv_rkey_size 9\n#\n";
  EXPECT_EQ(net::ucx::describe(net::ucx::parse_lanes(kText)),
            "rc_mlx5/mlx5_0:1.0 (puts, messages), tcp/eth0.0 (messages), cma/memory");
  EXPECT_EQ(net::ucx::describe(net::ucx::parse_lanes("")), "unknown");
  EXPECT_EQ(net::ucx::describe(net::ucx::parse_lanes("# lane[0]:")), "unknown");
}

TEST(NetUcx, LanesAreInMemoryIfAllAre) {
  const net::ucx::Lane posix{.transport = "posix/memory.0", .puts = true};
  const net::ucx::Lane sysv{.transport = "sysv/memory", .messages = true};
  const net::ucx::Lane tcp{.transport = "tcp/lo.0", .messages = true};
  EXPECT_TRUE(net::ucx::are_in_memory({sysv, posix}));
  EXPECT_FALSE(net::ucx::are_in_memory({sysv, tcp}));
  EXPECT_FALSE(net::ucx::are_in_memory({}));
}

}  // namespace
}  // namespace ferry::test

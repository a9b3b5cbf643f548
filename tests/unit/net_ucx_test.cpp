/// Properties of the UCX engine alone: its effect on the process that loads it, and UCX's variables.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "net/ucx/engine.hpp"
#include "net/ucx/paths.hpp"
#include "net/ucx/resources.hpp"
#include "net/ucx/setup.hpp"
#include "support/bootstrap_ranks.hpp"
#include "support/net_ends.hpp"
#include "unit/net_ucx_process.hpp"

namespace ferry::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

Status create_status(std::string_view engine = "ucx") {
  std::vector<std::byte> memory(4096);
  net::EngineOptions options{.self = 0, .num_peers = 2, .num_channels = 1, .memory = memory};
  options.may_start_receiver = has_receivers(engine);
  return net_engine(engine).create(options).status();
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

/// Loads UCX as another library of the process would, and returns its path.
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
  EXPECT_THAT(status.message(), HasSubstr("has 69632 bytes of GPU memory, expected 0"));
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

TEST(NetUcx, TooFewDescriptorsAreATypedErrorThatNamesTheLimit) {
  // From none to enough descriptors: UCX ends the process if it runs out by itself.
  for (const char* engine : kUcxEngines) {
    bool created = false;
    // A receiver is left out if descriptors do not suffice for it.
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
  // Enough for none, one, two or all three of the ends, which share the process's limit.
  constexpr std::array<rlim_t, 2> kEnough{40, 120};  // by engine
  constexpr std::array<rlim_t, 13> kNumLeft{0, 4, 8, 12, 14, 18, 22, 26, 40, 56, 72, 96, 120};
  for (std::size_t one_case = 0; one_case < 2 * kNumLeft.size(); ++one_case) {
    const rlim_t num_left = kNumLeft[one_case / 2];
    const char* const engine = kUcxEngines[one_case % 2];
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
    setenv("UCX_POSIX_DIR", "/proc", 1);  // a file system without room on any machine
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
  EXPECT_TRUE(setups_for(Scope::kNetwork, "", surroundings)[0].has_cards);
  EXPECT_EQ(setups_for(Scope::kHost, "", surroundings)[0].transports, "");
  EXPECT_EQ(setups_for(Scope::kHost, "", surroundings)[0].devices, "lo");
}

TEST(NetUcx, SetupsSayWhetherCardsMayConnectPeers) {
  using net::ucx::Scope;
  using net::ucx::setups_for;
  net::ucx::Surroundings surroundings{.loopback = "lo"};
  EXPECT_FALSE(setups_for(Scope::kNetwork, "", surroundings)[0].has_cards);
  surroundings.has_infiniband = true;
  EXPECT_TRUE(setups_for(Scope::kNetwork, "", surroundings)[0].has_cards);
  EXPECT_FALSE(setups_for(Scope::kNetwork, "", surroundings)[1].has_cards) << "in place of cards that do not work";
  EXPECT_FALSE(setups_for(Scope::kHost, "", surroundings)[0].has_cards);
  for (const char* with : {"all", "^tcp", "rc_x", "tcp,ib"}) {
    surroundings.transports = with;
    EXPECT_TRUE(setups_for(Scope::kNetwork, "", surroundings)[0].has_cards) << with;
  }
  for (const char* without : {"tcp", "^rc", "posix,tcp"}) {
    surroundings.transports = without;
    EXPECT_FALSE(setups_for(Scope::kNetwork, "", surroundings)[0].has_cards) << without;
  }
}

TEST(NetUcx, OnlyNewVersionsSpreadPutsOverConnections) {
  using net::ucx::check_card_settings;
  net::ucx::Library library;
  library.major = 1;
  library.minor = 13;
  library.version = "UCX 1.13";
  EXPECT_TRUE(check_card_settings(library, {.service_level = 3}).ok());
  const Status refused = check_card_settings(library, {.num_paths = 2});
  EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(refused.message()).find("network_paths is 2, and UCX 1.13 puts by one connection"),
            std::string::npos)
      << refused.message();
  library.minor = 15;
  EXPECT_TRUE(check_card_settings(library, {.num_paths = 2}).ok());
  library.major = 2;
  library.minor = 0;
  EXPECT_TRUE(check_card_settings(library, {.num_paths = 2}).ok());
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

/// `ferry demo` and `ferry bench` over several nodes emulated on this host: results, bytes by formula, refusals.

#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ferry/transports.hpp"
#include "launch/listening_sockets.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

/// Skipped on machines where no network joins processes.
class Nodes : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const TransportInfo& transport : transports()) {
      if (transport.name == "ucx" && !transport.available) GTEST_SKIP() << transport.reason;
    }
  }
};

TEST_F(Nodes, DemoVerifiesOverThem) {
  for (const char* nodes : {"2", "4"}) {
    for (const char* dtype : {"bf16", "fp8"}) {
      const TemporaryFile file;
      const CommandEnd end = run_ferry({"demo", "--ranks", "4", "--nodes", nodes, "--tokens", "24", "--scale", "64",
                                        "--dtype", dtype, "--report", file.path()});
      ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
      EXPECT_TRUE(contains(end.standard_output, "verified: 96 tokens")) << end.standard_output;
      const json report = json::parse(file.read());
      EXPECT_EQ(report["nodes"], std::stoi(nodes));
      EXPECT_LE(report["largest_share_of_bound"].get<double>(), 1.0);
      EXPECT_EQ(report["network"]["transport"], "ucx");
      EXPECT_GT(report["network"]["route"].size(), 0U);
      for (const char* call : {"dispatch", "combine"}) {
        const json& sent = report["network"][call];
        EXPECT_GE(sent["sent_bytes"], sent["formula_bytes"]) << call;
        EXPECT_GE(sent["sent_bytes_per_rank_max"].get<double>(), sent["sent_bytes_per_rank_mean"].get<double>());
      }
    }
  }
}

TEST_F(Nodes, DemoStillSeesASpoiledToken) {
  const CommandEnd end =
      run_ferry({"demo", "--ranks", "2", "--nodes", "2", "--tokens", "24", "--scale", "64", "--spoil-token", "30"});
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_TRUE(contains(end.standard_output, "the first is token 30")) << end.standard_output;
}

json bench_results(std::vector<std::string> more) {
  const TemporaryFile file;
  std::vector<std::string> arguments = {"bench", "--ranks",   "4", "--nodes",   "2",        "--topk",
                                        "2",     "--experts", "8", "--backend", "cpu",      "--iterations",
                                        "2",     "--warmup",  "0", "--json",    file.path()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const CommandEnd end = run_ferry(arguments);
  EXPECT_EQ(end.exit_code, 0) << ::testing::PrintToString(arguments) << end.standard_output << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "no limit measured for several nodes")) << end.standard_output;
  return end.exit_code == 0 ? json::parse(file.read())["results"] : json::array();
}

TEST_F(Nodes, BenchComparesCallsWithTheRateOfTheNetwork) {
  const json results = bench_results(
      {"--op", "dispatch", "--tokens", "16", "--hidden", "256", "--routing", "one-hot", "--network-rate", "0.5"});
  ASSERT_EQ(results.size(), 1U);
  const json& network = results[0]["network"];
  EXPECT_EQ(network["rate_gbps"], 0.5);
  const double most_bytes = network["sent_bytes_per_rank_max"];
  EXPECT_NEAR(network["wire_us"].get<double>(), most_bytes / 500, 1e-3);
  EXPECT_NEAR(network["ratio_to_wire"].get<double>(),
              network["wire_us"].get<double>() / results[0]["time_us_p50"].get<double>(), 1e-4);
  EXPECT_EQ(bench_results({"--op", "dispatch", "--tokens", "16", "--hidden", "256"})[0]["network"]["wire_us"], nullptr);
}

TEST_F(Nodes, BenchCountsBytesByTheFormula) {
  // All tokens go to experts 0 and 1, both on rank 0: 16 tokens of each of ranks 2 and 3 cross to the other node.
  const json results = bench_results({"--tokens", "16", "--hidden", "256", "--routing", "one-hot"});
  ASSERT_EQ(results.size(), 3U);
  constexpr std::int64_t kRows = 32;
  EXPECT_EQ(results[0]["network"]["formula_bytes"], kRows * (512 + 16));  // two ids and weights of four bytes each
  EXPECT_EQ(results[1]["network"]["formula_bytes"], kRows * 512);
  EXPECT_EQ(results[2]["network"]["formula_bytes"], kRows * (1024 + 16));
  for (const json& result : results) {
    EXPECT_EQ(result["nodes"], 2);
    EXPECT_EQ(result["transport"], "ucx");
    EXPECT_TRUE(result["limit_gbps"].is_null());
    EXPECT_TRUE(result["ratio_to_limit"].is_null());
    EXPECT_GT(result["network"]["gbps"].get<double>(), 0.0);
    EXPECT_GT(result["network"]["messages"].get<std::int64_t>(), 0);
    EXPECT_GE(result["network"]["sent_bytes"], result["network"]["formula_bytes"]);
  }
}

TEST_F(Nodes, BenchSendsLittleBesideTheRows) {
  for (const char* layout : {"tokens", "experts", "slab"}) {
    for (const char* dtype : {"bf16", "fp8"}) {
      const json results = bench_results({"--tokens", "256", "--hidden", "2048", "--layout", layout, "--dtype", dtype});
      ASSERT_EQ(results.size(), 3U);
      for (const json& result : results) {
        const double ratio = result["network"]["ratio_to_formula"].get<double>();
        EXPECT_GE(ratio, 1.0) << layout << " " << result;
        EXPECT_LE(ratio, 1.01) << layout << " " << result;
      }
    }
  }
}

TEST_F(Nodes, MayBeThreadsJoinedByAMemoryCopy) {
  const json results =
      bench_results({"--tokens", "16", "--hidden", "256", "--launch", "threads", "--transport", "loopback"});
  ASSERT_EQ(results.size(), 3U);
  for (const json& result : results) EXPECT_EQ(result["transport"], "loopback");
}

TEST_F(Nodes, RouteIsMeteredWithoutAFormula) {
  const json results = bench_results({"--op", "route", "--tokens", "16", "--hidden", "64"});
  ASSERT_EQ(results.size(), 1U);
  EXPECT_GT(results[0]["network"]["sent_bytes"].get<std::int64_t>(), 0);
  EXPECT_TRUE(results[0]["network"]["formula_bytes"].is_null());
}

TEST_F(Nodes, OfOneHostListenOnLoopbackOnly) {
  RunningCommand command({"bench", "--ranks", "4", "--nodes", "2", "--backend", "cpu", "--tokens", "16", "--hidden",
                          "256", "--topk", "2", "--experts", "8", "--warmup", "0", "--iterations", "1000000"});
  ASSERT_TRUE(command.wait_for_error_text("iteration 1 of"));
  std::size_t num_sockets = 0;
  for (const pid_t rank : command.children()) {
    for (const launch::ListeningSocket& socket : launch::listening_sockets(rank)) {
      EXPECT_TRUE(socket.loopback) << "process " << rank << " listens on " << socket.address << ":" << socket.port;
      ++num_sockets;
    }
  }
  EXPECT_GT(num_sockets, 0U) << "the network's own sockets were not seen";
}

TEST(NodesRefused, ADeviceThatIsNone) {
  for (const auto& [option, environment] : std::vector<std::pair<std::vector<std::string>, Environment>>{
           {{"--net-device", "nonesuch0"}, {}}, {{}, {{"FERRY_NET_DEVICES", "nonesuch0"}}}}) {
    std::vector<std::string> arguments = {"bench", "--ranks", "2", "--nodes", "2", "--backend", "cpu"};
    arguments.insert(arguments.end(), option.begin(), option.end());
    const CommandEnd end = run_ferry(arguments, environment);
    EXPECT_EQ(end.exit_code, 1) << end.standard_error;
    EXPECT_TRUE(contains(end.standard_error, "is \"nonesuch0\": no network device is called")) << end.standard_error;
    EXPECT_TRUE(contains(end.standard_error, "this host has ")) << end.standard_error;
    EXPECT_TRUE(contains(end.standard_error, "lo (")) << end.standard_error;
    EXPECT_TRUE(contains(end.standard_error, "kInvalidArgument")) << end.standard_error;
  }
}

TEST(NodesRefused, WithAReason) {
  struct Refused {
    std::vector<std::string> arguments;
    const char* message;
  };
  const std::vector<Refused> all = {
      {{"--nodes", "3"}, "8 ranks cannot be spread evenly over that many nodes; give one of 1, 2, 4, 8"},
      {{"--nodes", "2", "--ranks", "3"}, "3 ranks cannot be spread evenly"},
      {{"--nodes", "0"}, "--nodes 0"},
      {{"--nodes", "-2"}, "--nodes -2"},
      {{"--nodes", "many"}, "--nodes"},
      {{"--transport", "pigeon"}, "--transport"},
  };
  for (const char* command : {"demo", "bench"}) {
    for (const Refused& refused : all) {
      std::vector<std::string> arguments = {command};
      arguments.insert(arguments.end(), refused.arguments.begin(), refused.arguments.end());
      const CommandEnd end = run_ferry(arguments);
      EXPECT_EQ(end.exit_code, 2) << ::testing::PrintToString(arguments);
      EXPECT_EQ(end.standard_output, "") << ::testing::PrintToString(arguments);
      EXPECT_TRUE(contains(end.standard_error, refused.message)) << end.standard_error;
    }
  }
}

TEST(NodesRefused, WhereTheyDisagreeWithALauncher) {
  const Environment two_hosts = {{"RANK", "0"},
                                 {"WORLD_SIZE", "4"},
                                 {"LOCAL_WORLD_SIZE", "2"},
                                 {"FERRY_HOST", "127.0.0.1"},
                                 {"FERRY_SECRET", "of this test"}};
  CommandEnd end = run_ferry({"demo", "--nodes", "1"}, two_hosts);
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_TRUE(contains(end.standard_error, "spread the ranks over 2 hosts")) << end.standard_error;
  end = run_ferry({"demo"}, {{"RANK", "0"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_WORLD_SIZE", "3"},
                             {"FERRY_HOST", "127.0.0.1"},
                             {"FERRY_SECRET", "of this test"}});
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_TRUE(contains(end.standard_error, "LOCAL_WORLD_SIZE=3 for 4 ranks")) << end.standard_error;
}

}  // namespace
}  // namespace ferry::testing

/// The command's messages for wrong arguments, unusable files and limits of the machine.

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

struct Refusal {
  const char* name;
  std::vector<std::string> arguments;
  const char* message;
};

/// Prints the parameter for GoogleTest.
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class Refusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refusals, SayWhatIsExpected) {
  const CommandEnd end = run_ferry(GetParam().arguments);
  EXPECT_EQ(end.exit_code, 2) << end.standard_error;
  EXPECT_EQ(end.standard_output, "");
  EXPECT_NE(end.standard_error.find(GetParam().message), std::string::npos) << end.standard_error;
}

INSTANTIATE_TEST_SUITE_P(
    All, Refusals,
    ::testing::Values(
        Refusal{"DemoDType", {"demo", "--dtype", "f32"}, "--dtype: f32 not in {bf16,fp8}"},
        Refusal{"DemoDTypeNumber", {"demo", "--dtype", "1"}, "--dtype: 1 not in {bf16,fp8}"},
        Refusal{"BenchDType", {"bench", "--dtype", "f32"}, "--dtype: f32 not in {bf16,fp8}"},
        Refusal{
            "BenchOp",
            {"bench", "--op", "gather"},
            "--op: gather not in {route,dispatch,combine,pair,latency-dispatch,latency-combine,latency-pair,put,get,"
            "signal,fadd}"},
        Refusal{
            "BenchOpNumber",
            {"bench", "--op", "0"},
            "--op: 0 not in {route,dispatch,combine,pair,latency-dispatch,latency-combine,latency-pair,put,get,signal,"
            "fadd}"},
        Refusal{"BenchLayout", {"bench", "--layout", "rows"}, "--layout: rows not in {tokens,experts,slab}"},
        Refusal{"BenchMemory", {"bench", "--memory", "unified"}, "--memory: unified not in {symmetric,plain}"},
        Refusal{"BenchCopyPath", {"bench", "--copy-path", "x"}, "--copy-path: x not in {auto,bulk,load-store}"},
        Refusal{"Launch", {"demo", "--launch", "mpi"}, "--launch: mpi not in {auto,fork,environment,threads}"},
        Refusal{"Transport", {"demo", "--transport", "tcp"}, "--transport: tcp not in {auto,ucx,loopback}"},
        Refusal{"LoopbackBetweenProcesses",
                {"bench", "--ranks", "2", "--nodes", "2", "--transport", "loopback"},
                "--transport loopback joins threads only; give --launch threads"},
        Refusal{"TextIsAFolder", {"demo", "--text", "/tmp"}, "cannot read the text /tmp: Is a directory"},
        Refusal{"TraceIsAFolder", {"demo", "--trace", "/"}, "cannot read the trace /: Is a directory"},
        Refusal{"BenchTraceIsAFolder", {"bench", "--routing", "trace:/"}, "cannot read the trace /: Is a directory"},
        Refusal{"TextIsEmpty", {"demo", "--text", "/dev/null"}, "the text /dev/null is empty"},
        Refusal{"TextIsMissing", {"demo", "--text", "/no/such"}, "cannot read the text /no/such: No such file"},
        Refusal{"RanksNotWhole", {"demo", "--ranks", "1.5"}, "--ranks: 1.5 is not a whole number"},
        Refusal{"RanksBeyondNumbers", {"demo", "--ranks", "99999999999"}, "--ranks: 99999999999 is not a whole number"},
        Refusal{"TokensAsAPower", {"bench", "--tokens", "1e3"}, "--tokens: 1e3 is not a whole number from 1 to"},
        Refusal{"SeedNegative", {"demo", "--seed", "-1"}, "--seed: -1 is not a whole number from 0"},
        Refusal{"SeedBeyondNumbers", {"demo", "--seed", "18446744073709551616"}, "--seed: 18446744073709551616 is not"},
        Refusal{
            "SpoilTokenNegative", {"demo", "--spoil-token", "-1"}, "--spoil-token: -1 is not a whole number from 0"},
        Refusal{"TimeoutNotANumber", {"demo", "--timeout", "nan"}, "--timeout: nan is not a number"},
        Refusal{"ReportWithoutName", {"demo", "--report", ""}, "--report: the path is empty"},
        Refusal{"PictureWithoutName", {"demo", "--picture", ""}, "--picture: the path is empty"},
        Refusal{"JsonWithoutName", {"bench", "--json", ""}, "--json: the path is empty"},
        Refusal{"TextWithoutName", {"demo", "--text", ""}, "--text: the path is empty"},
        Refusal{"NoCommand", {}, "no command was given; give one of demo, bench, tune, plan, doctor"},
        Refusal{"NoSuchCommand", {"help"}, "help is not a command; give one of demo, bench, tune, plan, doctor"},
        Refusal{"NoSuchOption", {"--nosuch"}, "--nosuch is not a command"},
        Refusal{"UnknownOption", {"demo", "--rank", "4"}, "ferry demo: --rank is not an argument that it takes"},
        Refusal{"AttachToAName", {"doctor", "--attach", "abc"}, "--attach: abc is not a whole number from 1 to"},
        Refusal{"AttachToAFraction", {"doctor", "--attach", "1.5"}, "--attach: 1.5 is not a whole number from 1 to"},
        Refusal{"ArenaWithoutNumber", {"demo", "--arena", "G"}, "--arena"},
        Refusal{"ArenaOfUnknownUnit", {"bench", "--arena", "8X"}, "--arena"},
        Refusal{"ArenaNegative", {"bench", "--arena", "-8G"}, "--arena"},
        Refusal{"ArenaTooLarge", {"bench", "--arena", "65T"}, "--arena"},
        Refusal{"ArenaBeyondNumbers", {"bench", "--arena", "99999999999G"}, "--arena"},
        Refusal{"ArenaOfNothing", {"bench", "--arena", "0"}, "--arena"}),
    [](const auto& test) { return test.param.name; });

TEST(Text, MayHaveNoEnd) {
  const CommandEnd end = run_ferry({"demo", "--backend", "cpu", "--ranks", "2", "--tokens", "8", "--scale", "64",
                                    "--model", "mixtral-8x7b", "--text", "/dev/zero"});
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_NE(end.standard_output.find("verified: 16 tokens"), std::string::npos) << end.standard_output;
}

TEST(Arena, IsAsLargeAsTheOptionSays) {
  const std::vector<std::string> small = {"bench", "--backend",    "cpu",  "--ranks", "2", "--tokens",
                                          "64",    "--hidden",     "1024", "--topk",  "2", "--experts",
                                          "4",     "--iterations", "1",    "--arena"};
  for (const char* size : {"64M", "64MiB", "64 MB", "67108864", "0x4000000"}) {
    std::vector<std::string> arguments = small;
    arguments.emplace_back(size);
    const CommandEnd end = run_ferry(arguments);
    EXPECT_EQ(end.exit_code, std::string(size).starts_with("0x") ? 2 : 0) << size << end.standard_error;
  }
  std::vector<std::string> arguments = small;
  arguments.emplace_back("64k");
  for (const char* command : {"bench", "demo"}) {
    if (std::string(command) == "demo") {
      arguments = {"demo", "--backend", "cpu", "--ranks", "2", "--tokens", "64", "--scale", "8", "--arena", "64k"};
    }
    const CommandEnd end = run_ferry(arguments);
    EXPECT_EQ(end.exit_code, 1) << end.standard_error;
    EXPECT_NE(end.standard_error.find("(kCapacity"), std::string::npos) << end.standard_error;
    EXPECT_NE(end.standard_error.find("raise --arena"), std::string::npos) << end.standard_error;
  }
}

/// Either rank may be the first to report it, in the words of the rank whose call failed.
TEST(Arena, ThatIsTooSmallIsReportedWithOneRank) {
  constexpr int kNumRuns = 8;  // half of the runs are reported by the other rank
  for (int run = 0; run < kNumRuns; ++run) {
    const CommandEnd end =
        run_ferry({"bench", "--backend", "cpu", "--ranks", "2", "--op", "route", "--tokens", "512", "--arena", "1"});
    EXPECT_EQ(end.exit_code, 1) << end.standard_error;
    const std::string& words = end.standard_error;
    EXPECT_NE(words.find("raise --arena"), std::string::npos) << words;
    const bool names_first = words.find("rank 0") != std::string::npos;
    const bool names_second = words.find("rank 1") != std::string::npos;
    EXPECT_NE(names_first, names_second) << words;
  }
}

TEST(AddressSpace, ThatIsTooSmallForTheArenaNamesTheOption) {
  const CommandEnd end = run_script("ulimit -v 8000000; \"$FERRY\" demo --backend cpu --ranks 2 --tokens 8 --scale 64");
  // Sanitizers themselves need more address space than that, and report it.
  if (end.standard_error.find("Sanitizer") != std::string::npos) return;
  EXPECT_EQ(end.exit_code, 1) << end.standard_error;
  EXPECT_NE(end.standard_error.find("lower --arena"), std::string::npos) << end.standard_error;
}

TEST(Descriptors, ThatRunOutAreReportedAtOnce) {
  bool refused = false;
  for (const int limit : {8, 10, 12, 14, 16, 18, 20, 24, 32, 64}) {
    const CommandEnd end = run_script("ulimit -n " + std::to_string(limit) +
                                      "; \"$FERRY\" demo --backend cpu --ranks 4 --tokens 4 --scale 64 --model "
                                      "mixtral-8x7b --timeout 600");
    if (end.exit_code == 0) {
      EXPECT_GT(limit, 12);
      continue;
    }
    refused = true;
    EXPECT_EQ(end.exit_code, 1) << limit << end.standard_error;
    EXPECT_NE(end.standard_error.find("(kSystem"), std::string::npos) << limit << ": " << end.standard_error;
    EXPECT_NE(end.standard_error.find("ulimit -n"), std::string::npos) << limit << ": " << end.standard_error;
    EXPECT_LT(limit, 64) << end.standard_error;
  }
  EXPECT_TRUE(refused);
}

}  // namespace
}  // namespace ferry::testing

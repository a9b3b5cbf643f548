/// Files of kernel settings: their meaning, refused contents, and the ranks that read them.

#include "core/tuning.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "ferry/group.hpp"

namespace ferry::test {
namespace {

using ::testing::HasSubstr;

constexpr const char* kGood = R"({
  "ferry_tuning": 2,
  "tables": [
    {"gpu": "NVIDIA H200", "driver": "580.159.04", "num_ranks": 8, "entries": [
      {"operation": "dispatch", "layout": "tokens", "staged": false,
       "min_tokens": 2049, "max_tokens": 8192, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 11, "num_copy_sms": 0, "chunk_tokens": 0, "default_time_us": 424.5, "time_us": 420},
      {"operation": "dispatch", "layout": "tokens", "staged": true,
       "min_tokens": 2049, "max_tokens": 8192, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 30, "num_copy_sms": 12, "chunk_tokens": 256},
      {"operation": "dispatch", "layout": "slab", "staged": true,
       "min_tokens": 33, "max_tokens": 128, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 40, "num_copy_sms": 20, "chunk_tokens": 0},
      {"operation": "combine", "layout": "experts", "staged": false,
       "min_tokens": 0, "max_tokens": 100000, "min_row_bytes": 0, "max_row_bytes": 20000,
       "num_sms": 0, "num_copy_sms": 0, "chunk_tokens": 64}]},
    {"gpu": "NVIDIA H200", "num_ranks": 4, "entries": []}]})";

/// Tables for two nodes of eight ranks, and for latency mode on one node of two.
constexpr const char* kNodesAndLatency = R"({
  "ferry_tuning": 2,
  "tables": [
    {"gpu": "NVIDIA H200", "network": "mlx5_0:1", "num_nodes": 2, "num_ranks": 8, "entries": [
      {"operation": "dispatch", "layout": "tokens", "staged": false,
       "min_tokens": 2049, "max_tokens": 8192, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 12, "num_copy_sms": 4, "chunk_tokens": 32},
      {"operation": "combine", "layout": "tokens", "staged": true,
       "min_tokens": 2049, "max_tokens": 8192, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 3, "num_copy_sms": 0, "chunk_tokens": 16}]},
    {"gpu": "NVIDIA H200", "num_nodes": 1, "num_ranks": 2, "entries": [
      {"operation": "latency_dispatch", "layout": "slab", "staged": false,
       "min_tokens": 65, "max_tokens": 256, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 40, "num_copy_sms": 0, "chunk_tokens": 0},
      {"operation": "latency_combine", "layout": "slab", "staged": false,
       "min_tokens": 65, "max_tokens": 256, "min_row_bytes": 5000, "max_row_bytes": 9999,
       "num_sms": 50, "num_copy_sms": 0, "chunk_tokens": 0}]}]})";

std::vector<TuningTable> good_tables() { return parse_tuning(kGood, "FILE").value(); }

/// A text with one part replaced.
std::string changed(std::string_view from, std::string_view to, std::string text = kGood) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Tuning, ServesItsGpuAndNumberOfRanksOnly) {
  const std::vector<TuningTable> tables = good_tables();
  EXPECT_EQ(tuning_for(tables, "NVIDIA H200", 1, 8).size(), 4U);
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H200", 1, 4).empty());
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H200", 1, 2).empty());
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H100", 1, 8).empty());
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H200", 2, 8).empty()) << "a table without num_nodes is for one node";
}

TEST(Tuning, ServesItsNumberOfNodesOnly) {
  const std::vector<TuningTable> tables = parse_tuning(kNodesAndLatency, "FILE").value();
  const std::vector<TuningEntry> nodes = tuning_for(tables, "NVIDIA H200", 2, 8);
  EXPECT_EQ(nodes.size(), 2U);
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H200", 1, 8).empty());
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H200", 1, 16).empty());
  EXPECT_TRUE(tuning_for(tables, "NVIDIA H200", 4, 8).empty());
  const KernelOptions dispatch = tuned({}, nodes, {Operation::kDispatch, Layout::kTokens, 4096, 7168, false});
  EXPECT_EQ(dispatch.num_sms, 12);
  EXPECT_EQ(dispatch.num_copy_sms, 4);
  EXPECT_EQ(dispatch.chunk_tokens, 32);
}

TEST(Tuning, TellsTheModesApart) {
  const std::vector<TuningEntry> entries =
      tuning_for(parse_tuning(kNodesAndLatency, "FILE").value(), "NVIDIA H200", 1, 2);
  EXPECT_EQ(tuned({}, entries, {Operation::kLatencyDispatch, Layout::kSlab, 128, 7168, false}).num_sms, 40);
  EXPECT_EQ(tuned({}, entries, {Operation::kLatencyCombine, Layout::kSlab, 128, 7168, false}).num_sms, 50);
  EXPECT_EQ(tuned({}, entries, {Operation::kDispatch, Layout::kSlab, 128, 7168, false}).num_sms, 0);
  EXPECT_EQ(tuned({}, entries, {Operation::kLatencyDispatch, Layout::kSlab, 64, 7168, false}).num_sms, 0);
}

TEST(Tuning, TakesThePlaceOfWhatTheCallLeavesOpen) {
  const std::vector<TuningEntry> entries = tuning_for(good_tables(), "NVIDIA H200", 1, 8);
  const TunedCall staged{Operation::kDispatch, Layout::kTokens, 4096, 7168, true};
  const KernelOptions all = tuned({}, entries, staged);
  EXPECT_EQ(all.num_sms, 30);
  EXPECT_EQ(all.num_copy_sms, 12);
  EXPECT_EQ(all.chunk_tokens, 256);
  const KernelOptions bounded = tuned({.num_sms = 16}, entries, staged);
  EXPECT_EQ(bounded.num_sms, 16);
  EXPECT_EQ(bounded.num_copy_sms, 0) << "12 of 16 were never measured: the default divides them";
  EXPECT_EQ(bounded.chunk_tokens, 256);
  const KernelOptions copying = tuned({.num_copy_sms = 5, .chunk_tokens = 1}, entries, staged);
  EXPECT_EQ(copying.num_sms, 30);
  EXPECT_EQ(copying.num_copy_sms, 5);
  EXPECT_EQ(copying.chunk_tokens, 1);
  EXPECT_EQ(tuned({.copy_path = CopyPath::kLoadStore}, entries, staged).copy_path, CopyPath::kLoadStore);
}

TEST(Tuning, LeavesOtherCallsAlone) {
  const std::vector<TuningEntry> entries = tuning_for(good_tables(), "NVIDIA H200", 1, 8);
  for (const TunedCall& call : {TunedCall{Operation::kDispatch, Layout::kTokens, 4096, 4999, false},
                                TunedCall{Operation::kDispatch, Layout::kTokens, 4096, 10000, true},
                                TunedCall{Operation::kDispatch, Layout::kTokens, 2048, 7168, false},
                                TunedCall{Operation::kDispatch, Layout::kTokens, 8193, 7168, false},
                                TunedCall{Operation::kDispatch, Layout::kExperts, 4096, 7168, false},
                                TunedCall{Operation::kDispatch, Layout::kSlab, 4096, 7168, true},
                                TunedCall{Operation::kCombine, Layout::kTokens, 4096, 7168, false},
                                TunedCall{Operation::kCombine, Layout::kExperts, 4096, 7168, true}}) {
    const KernelOptions options = tuned({}, entries, call);
    EXPECT_EQ(options.num_sms + options.num_copy_sms + options.chunk_tokens, 0)
        << call.num_tokens << " tokens, " << call.row_bytes << " bytes";
  }
  const auto tuned_sms = [&entries](const TunedCall& call) { return tuned({}, entries, call).num_sms; };
  EXPECT_EQ(tuned_sms({Operation::kDispatch, Layout::kTokens, 4096, 5000, false}), 11);
  EXPECT_EQ(tuned_sms({Operation::kDispatch, Layout::kTokens, 4096, 9999, false}), 11);
  EXPECT_EQ(tuned_sms({Operation::kDispatch, Layout::kTokens, 2049, 7168, false}), 11);
  EXPECT_EQ(tuned_sms({Operation::kDispatch, Layout::kTokens, 8192, 7168, false}), 11);
  EXPECT_EQ(tuned_sms({Operation::kDispatch, Layout::kSlab, 64, 7168, true}), 40);
  EXPECT_EQ(tuned({}, entries, {Operation::kCombine, Layout::kExperts, 0, 0, false}).chunk_tokens, 64);
}

TEST(Tuning, SaysWhichLineOrFieldIsWrong) {
  struct Wrong {
    std::string text;
    const char* what;
  };
  const auto nodes = [](std::string_view from, std::string_view to) { return changed(from, to, kNodesAndLatency); };
  const std::vector<Wrong> all = {
      {"", "line 1 is no JSON"},
      {changed("\"entries\": []", "\"entries\": ["), "line 17 is no JSON"},
      {"[]", "the whole is an array, expected an object"},
      {changed("\"ferry_tuning\": 2", "\"ferry_tuning\": 1"), "ferry_tuning is 1, expected a whole number of 2 to 2"},
      {changed("\"tables\"", "\"table\""), "\"table\" is unknown, expected only ferry_tuning, tables"},
      {changed("\"gpu\": \"NVIDIA H200\", \"num_ranks\": 4", "\"num_ranks\": 4"), "tables[1].gpu is missing"},
      {changed("\"num_ranks\": 4", "\"num_ranks\": 0"), "tables[1].num_ranks is 0"},
      {changed("\"num_ranks\": 4", "\"num_ranks\": 8"),
       "tables[1] is for the GPU and the numbers of nodes and ranks of tables[0]"},
      {changed("\"layout\": \"tokens\", ", ""), "tables[0].entries[0].layout is missing"},
      {changed("\"slab\"", "\"rows\""), "entries[2].layout is \"rows\", expected one of tokens, experts, slab"},
      {changed("\"min_tokens\": 33, ", ""), "entries[2].min_tokens is missing"},
      {changed("\"max_tokens\": 128", "\"max_tokens\": 32"), "entries[2].max_tokens is 32"},
      {changed("\"dispatch\"", "\"route\""),
       "tables[0].entries[0].operation is \"route\", expected one of dispatch, combine, latency_dispatch, "
       "latency_combine"},
      {changed("\"staged\": true", "\"staged\": 1"), "tables[0].entries[1].staged is 1, expected true or false"},
      {changed("\"staged\": true", "\"staged\": false"), "tables[0].entries[1] is for calls that entries[0]"},
      {changed("\"num_sms\": 30", "\"num_sms\": -30"),
       "entries[1].num_sms is -30, expected a whole number of 0 to 4096"},
      {changed("\"num_sms\": 30", "\"num_sms\": 30.5"), "entries[1].num_sms is 30.5"},
      {changed("\"num_sms\": 30", "\"num_sms\": \"30\""), "entries[1].num_sms is \"30\""},
      {changed("\"max_row_bytes\": 20000", "\"max_row_bytes\": 18446744073709551616"), "entries[3].max_row_bytes is"},
      {changed("\"max_row_bytes\": 9999", "\"max_row_bytes\": 4999"), "entries[0].max_row_bytes is 4999"},
      {changed("\"time_us\": 420", "\"time_us\": [420]"), "entries[0].time_us is an array, expected a number"},
      {changed("\"time_us\": 420", "\"time_us\": 1e999"), "out of range"},
      {changed("\"num_sms\": 30", "\"num_sm\": 30"), "entries[1].\"num_sm\" is unknown"},
      {nodes("\"num_nodes\": 2", "\"num_nodes\": 0"), "tables[0].num_nodes is 0"},
      {nodes("\"mlx5_0:1\"", "3"), "tables[0].network is 3, expected a string"},
      {nodes("\"num_nodes\": 1, \"num_ranks\": 2", "\"num_nodes\": 2, \"num_ranks\": 8"),
       "tables[1] is for the GPU and the numbers of nodes and ranks of tables[0]"},
      {nodes("\"num_sms\": 3", "\"num_sms\": 2"),
       "tables[0].entries[1].num_sms is 2, expected 0, or at least 3: two for each other node and one more"},
      {nodes("\"staged\": false", "\"staged\": true"),
       "tables[0].entries[0].staged is true, expected false: dispatch over several nodes is alike for all memory"},
      {nodes("\"num_copy_sms\": 0", "\"num_copy_sms\": 1"),
       "tables[0].entries[1].num_copy_sms is 1, expected 0: combine over several nodes has no such setting"},
      {nodes("\"latency_dispatch\", \"layout\": \"slab\"", "\"latency_dispatch\", \"layout\": \"tokens\""),
       "tables[1].entries[0].layout is tokens, expected slab, which latency_dispatch receives in"},
      {nodes("\"num_sms\": 40, \"num_copy_sms\": 0", "\"num_sms\": 40, \"num_copy_sms\": 2"),
       "tables[1].entries[0].num_copy_sms is 2, expected 0: latency_dispatch inside a node has no such setting"},
      {nodes("\"num_sms\": 50, \"num_copy_sms\": 0, \"chunk_tokens\": 0",
             "\"num_sms\": 50, \"num_copy_sms\": 0, \"chunk_tokens\": 8"),
       "tables[1].entries[1].chunk_tokens is 8, expected 0: latency_combine inside a node has no such setting"},
  };
  for (const Wrong& wrong : all) {
    const Status status = parse_tuning(wrong.text, "/etc/ferry.json").status();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << wrong.what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.what));
    EXPECT_THAT(std::string(status.message()), HasSubstr("/etc/ferry.json"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("ferry tune"));
  }
}

TEST(Tuning, NestingOfAnyDepthIsRefused) {
  const std::string deep = "{\"ferry_tuning\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  EXPECT_EQ(parse_tuning(deep, "FILE").status().code(), ErrorCode::kInvalidArgument);
}

class TuningFile : public testing::Test {
 protected:
  void SetUp() override { (void)unsetenv(kTuningVariable); }
  void TearDown() override {
    (void)unsetenv(kTuningVariable);
    std::filesystem::remove(path_);
  }
  void write(std::string_view text) { std::ofstream(path_) << text; }
  static Status create_group(const std::string& file) {
    GroupOptions options;
    options.backend = "cpu";
    options.tuning_file = file;
    return Group::create(create_in_process_bootstraps(1).value()[0], options).status();
  }
  const std::string path_ =
      (std::filesystem::temp_directory_path() / fmt::format("ferry-tuning-{}.json", getpid())).string();
};

TEST_F(TuningFile, IsNamedByTheOptionOrElseTheVariable) {
  EXPECT_TRUE(create_group("").ok()) << "neither option nor variable";
  ASSERT_EQ(setenv(kTuningVariable, path_.c_str(), 1), 0);
  const Status missing = create_group("");
  EXPECT_EQ(missing.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.message()), HasSubstr(path_ + ": cannot be opened: No such file"));
  EXPECT_TRUE(create_group("builtin").ok()) << "the option overrides the variable";
  write(kGood);
  EXPECT_TRUE(create_group("").ok());
  EXPECT_EQ(load_tuning("").value().size(), 2U);
  EXPECT_TRUE(load_tuning("builtin").value().empty());
  EXPECT_EQ(create_group("/no/such/file").code(), ErrorCode::kInvalidArgument);
  ASSERT_EQ(setenv(kTuningVariable, "/no/such/file", 1), 0);
  EXPECT_TRUE(create_group(path_).ok());
}

TEST_F(TuningFile, ThatIsNoFileOrTooLongIsRefused) {
  EXPECT_THAT(std::string(create_group("/").message()), HasSubstr("cannot be read: Is a directory"));
  write(std::string((1 << 20) + 1, ' '));
  EXPECT_THAT(std::string(create_group(path_).message()), HasSubstr("has more than 1048576 bytes"));
}

TEST_F(TuningFile, ThatOneRankCannotReadFailsAll) {
  write(kGood);
  const auto bootstraps = create_in_process_bootstraps(2).value();
  std::array<Status, 2> told;
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      GroupOptions options;
      options.backend = "cpu";
      options.tuning_file = rank == 1 ? "/no/such/file" : path_;
      told[rank] = Group::create(bootstraps[rank], options).status();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const Status& status : told) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(status.peer(), 1);
    EXPECT_THAT(std::string(status.message()), HasSubstr("/no/such/file"));
  }
}

}  // namespace
}  // namespace ferry::test

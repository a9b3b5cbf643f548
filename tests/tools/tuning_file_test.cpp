/// File that `ferry tune --out` writes: groups accept it, and tables of other machines in it are kept.

#include "bench/tuning_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ferry/group.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using tools::Json;
using tools::TunedCall;

constexpr std::int64_t kDefaultNs = 200'000;

TunedCall call(const std::string& operation, std::int64_t row_bytes, double gain, int num_sms) {
  TunedCall one;
  one.operation = operation;
  one.row_bytes = row_bytes;
  one.best.num_sms = num_sms;
  one.default_ns = kDefaultNs;
  one.best_ns = static_cast<std::int64_t>(static_cast<double>(kDefaultNs) / gain);
  return one;
}

tools::TunedBatch usual_batch() { return {"tokens", 4096}; }

Json file_with(const Json& file, const tools::TunedMachine& machine, const tools::TunedBatch& batch,
               const std::vector<TunedCall>& calls) {
  return tools::with_table(file, machine, batch, calls).value();
}

Status read_by_group(const Json& file) {
  const TemporaryFile on_disk(file.dump(2));
  GroupOptions options;
  options.backend = "cpu";
  options.tuning_file = on_disk.path();
  return Group::create(create_in_process_bootstraps(1).value()[0], options).status();
}

Json empty_file() { return tools::read_tuning_file("/no/such/file").value(); }

TEST(TuningFile, IsWhatGroupsRead) {
  TunedCall staged = call("combine", 14336, 1.2, 30);
  staged.staged = true;
  staged.best.num_copy_sms = 12;
  staged.best.chunk_tokens = 256;
  const Json file = file_with(empty_file(), {"NVIDIA H200", "580.1", 8}, usual_batch(),
                              {call("dispatch", 7168, 1.1, 11), call("dispatch", 14336, 1.1, 9), staged});
  const Status status = read_by_group(file);
  EXPECT_TRUE(status.ok()) << status.to_string();
  const Json& entries = file["tables"][0]["entries"];
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(entries[0]["operation"], "combine");
  EXPECT_EQ(entries[0]["staged"], true);
  EXPECT_EQ(entries[0]["num_copy_sms"], 12);
  EXPECT_EQ(entries[0]["chunk_tokens"], 256);
  EXPECT_EQ(entries[2]["num_sms"], 9);
  EXPECT_EQ(entries[2]["default_time_us"], 200.0);
}

TEST(TuningFile, ServesRowsOfAboutTheSizesThatWereMeasured) {
  const Json file =
      file_with(empty_file(), {"GPU", "1", 2}, usual_batch(),
                {call("dispatch", 16000, 1.1, 9), call("dispatch", 8000, 1.001, 7), call("dispatch", 1000, 1.1, 5)});
  const Json& entries = file["tables"][0]["entries"];
  ASSERT_EQ(entries.size(), 2U) << "no entry for 8000 bytes, where the default is as good";
  EXPECT_EQ(entries[0]["min_row_bytes"], 707);
  EXPECT_EQ(entries[0]["max_row_bytes"], 1414);
  EXPECT_EQ(entries[1]["min_row_bytes"], 11314) << "half way from 8000";
  EXPECT_EQ(entries[1]["max_row_bytes"], 22627);
}

TEST(TuningFile, KeepsTheTablesOfOtherMachines) {
  Json file = empty_file();
  file = file_with(file, {"A", "1", 8}, usual_batch(), {call("combine", 8000, 1.1, 1)});
  file = file_with(file, {"A", "1", 4}, usual_batch(), {call("combine", 8000, 1.1, 2)});
  file = file_with(file, {"B", "1", 8}, usual_batch(), {call("combine", 8000, 1.1, 3)});
  file = file_with(file, {"A", "2", 8}, usual_batch(), {call("combine", 8000, 1.1, 4), call("combine", 8000, 1.2, 5)});
  ASSERT_EQ(file["tables"].size(), 3U);
  EXPECT_EQ(file["tables"][0]["entries"][0]["num_sms"], 2);
  EXPECT_EQ(file["tables"][1]["entries"][0]["num_sms"], 3);
  EXPECT_EQ(file["tables"][2]["driver"], "2");
  EXPECT_EQ(file["tables"][2]["entries"].size(), 1U) << "a size that was measured twice has one entry";
}

TEST(TuningFile, ServesBatchesLikeThoseThatWereMeasuredAndKeepsWhatItHasForOthers) {
  const tools::TunedMachine machine{"GPU", "1", 2};
  Json file = empty_file();
  const auto tune = [&file, &machine](const char* layout, std::int64_t num_tokens, int num_sms) {
    file = file_with(file, machine, {layout, num_tokens}, {call("dispatch", 8000, 1.1, num_sms)});
  };
  tune("tokens", 4096, 1);
  tune("slab", 4096, 2);
  tune("tokens", 64, 3);
  tune("tokens", 5000, 4);
  ASSERT_EQ(file["tables"].size(), 1U);
  const Json& entries = file["tables"][0]["entries"];
  ASSERT_EQ(entries.size(), 3U) << "5000 tokens are like 4096";
  EXPECT_EQ(entries[0]["layout"], "slab");
  EXPECT_EQ(entries[0]["min_tokens"], 2049);
  EXPECT_EQ(entries[0]["max_tokens"], 8192);
  EXPECT_EQ(entries[1]["num_sms"], 3);
  EXPECT_EQ(entries[1]["min_tokens"], 33);
  EXPECT_EQ(entries[2]["layout"], "tokens");
  EXPECT_EQ(entries[2]["num_sms"], 4);
  const Status status = read_by_group(file);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(TuningFile, TellsNodesAndModesApart) {
  const tools::TunedMachine one_node{"GPU", "1", 8};
  const tools::TunedMachine two_nodes{"GPU", "1", 8, 2, "ucx mlx5_0:1"};
  const tools::TunedBatch slabs{"slab", 128};
  const tools::TunedBatch latency{"slab", 128, true};
  Json file = file_with(empty_file(), one_node, slabs, {call("dispatch", 8000, 1.1, 4)});
  file = file_with(file, two_nodes, slabs, {call("dispatch", 8000, 1.1, 5)});
  file = file_with(file, one_node, latency, {call("latency_dispatch", 8000, 1.1, 40)});
  file = file_with(file, one_node, latency, {call("latency_dispatch", 8000, 1.1, 41)});
  ASSERT_EQ(file["tables"].size(), 2U);
  const Json& of_nodes = file["tables"][0];
  EXPECT_EQ(of_nodes["num_nodes"], 2);
  EXPECT_EQ(of_nodes["network"], "ucx mlx5_0:1");
  EXPECT_EQ(of_nodes["entries"].size(), 1U);
  const Json& entries = file["tables"][1]["entries"];
  ASSERT_EQ(entries.size(), 2U) << "a new run of latency mode replaces the old one, and nothing else";
  EXPECT_EQ(entries[0]["num_sms"], 4);
  EXPECT_EQ(entries[1]["num_sms"], 41);
  const Status status = read_by_group(file);
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(TuningFile, ThatSaysNothingOfNodesIsForOne) {
  Json file = file_with(empty_file(), {"GPU", "1", 8}, usual_batch(), {call("dispatch", 8000, 1.1, 4)});
  file["tables"][0].erase("num_nodes");
  file = file_with(file, {"GPU", "1", 8}, usual_batch(), {call("dispatch", 8000, 1.1, 5)});
  ASSERT_EQ(file["tables"].size(), 1U);
  EXPECT_EQ(file["tables"][0]["entries"].size(), 1U);
  EXPECT_EQ(file["tables"][0]["entries"][0]["num_sms"], 5);
}

/// `num_calls` calls, to fill a table to its limit or beyond.
std::vector<TunedCall> many_calls(std::int64_t num_calls) {
  std::vector<TunedCall> calls;
  for (std::int64_t i = 1; i <= num_calls; ++i) calls.push_back(call("dispatch", i * 1000, 1.1, 9));
  return calls;
}

TEST(TuningFile, HasNoMoreThanGroupsRead) {
  constexpr std::int64_t kMaxEntries = 1024;
  const tools::TunedMachine machine{"GPU", "1", 2};
  Json file = file_with(empty_file(), machine, usual_batch(), many_calls(kMaxEntries));
  EXPECT_EQ(file["tables"][0]["entries"].size(), static_cast<std::size_t>(kMaxEntries));
  const Status status = read_by_group(file);
  EXPECT_TRUE(status.ok()) << status.to_string();
  Status refused = tools::with_table(empty_file(), machine, usual_batch(), many_calls(kMaxEntries + 1)).status();
  EXPECT_EQ(refused.code(), ErrorCode::kCapacity);
  refused = tools::with_table(file, machine, {"slab", 4096}, many_calls(1)).status();
  EXPECT_EQ(refused.code(), ErrorCode::kCapacity) << "the table's earlier entries are kept";
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("1025 entries of a table, of which groups read at "
                                                                   "most 1024; give --out a new file"));
  // Tables of other machines are added until the file is too long.
  for (int num_ranks = 3; num_ranks < 10 && refused.message().find("bytes") == std::string_view::npos; ++num_ranks) {
    Result<Json> more = tools::with_table(file, {"GPU", "1", num_ranks}, usual_batch(), many_calls(kMaxEntries));
    refused = more.status();
    if (more.ok()) file = *more;
  }
  EXPECT_EQ(refused.code(), ErrorCode::kCapacity);
  EXPECT_TRUE(read_by_group(file).ok());
}

TEST(TuningFile, IsNotWrittenOverSomethingElse) {
  for (const char* text : {"", "some notes", "[1]", "{\"ferry_tuning\": 1, \"tables\": []}"}) {
    const TemporaryFile file(text);
    EXPECT_EQ(tools::read_tuning_file(file.path()).status().code(), ErrorCode::kInvalidArgument) << text;
  }
  const TemporaryFile cut("{\"ferry_tuning\": 2,\n \"tables\": [");
  const Status status = tools::read_tuning_file(cut.path()).status();
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(cut.path() + ": parse error at line 2, column"));
}

}  // namespace
}  // namespace ferry::testing

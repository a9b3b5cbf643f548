/// bytes_required() equals the memory a rank holds, by the library's count and by the system's.

#include <dirent.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "ferry/ferry.hpp"
#include "support/exchange_check.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kNumTokens = 768;
constexpr std::int64_t kHidden = 2048;
constexpr std::int64_t kNumTopk = 8;
constexpr std::int64_t kNumExperts = 64;
constexpr std::int64_t kScaleWidth = 16;

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

/// Bytes of pages held by the file behind the mapping of `address`: resident size of this rank's arena.
std::size_t resident_bytes_of_arena(const void* address) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  ino_t inode = 0;
  while (std::getline(maps, line)) {
    std::istringstream fields(line);
    std::string range, permissions, offset, device;
    fields >> range >> permissions >> offset >> device >> inode;
    const std::size_t dash = range.find('-');
    const auto begin = std::strtoull(range.substr(0, dash).c_str(), nullptr, 16);
    const auto end = std::strtoull(range.substr(dash + 1).c_str(), nullptr, 16);
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    if (place >= begin && place < end) break;
    inode = 0;
  }
  if (inode == 0) return 0;
  std::size_t bytes = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(directory)) {
    struct stat info {};
    constexpr std::size_t kStatBlockBytes = 512;  // unit of st_blocks on every file system (stat(3type))
    if (stat((std::string("/proc/self/fd/") + entry->d_name).c_str(), &info) == 0 && info.st_ino == inode) {
      bytes = static_cast<std::size_t>(info.st_blocks) * kStatBlockBytes;
    }
  }
  closedir(directory);
  return bytes;
}

struct Memory {
  Buffer symmetric;
  std::vector<std::uint8_t> ordinary;

  std::byte* data() {
    return symmetric.data() != nullptr ? static_cast<std::byte*>(symmetric.data())
                                       : reinterpret_cast<std::byte*>(ordinary.data());
  }
  static Memory take(Group& group, bool is_symmetric, std::int64_t bytes) {
    Memory memory;
    if (is_symmetric) {
      memory.symmetric = group.allocate(to_size(bytes)).value();
    } else {
      memory.ordinary.resize(to_size(bytes));
    }
    return memory;
  }
};

void check_memory(RankContext& context, Layout layout, bool symmetric) {
  Result<std::shared_ptr<Group>> created = Group::create(context.bootstrap(), {.backend = "cpu"});
  if (!context.expect_ok(created.status(), "create")) return;
  Group& group = **created;
  const Buffer probe = group.allocate(1).value();

  std::vector<std::int32_t> ids(to_size(kNumTokens * kNumTopk));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>((i * 11 + i / 8 + to_size(context.rank())) % to_size(kNumExperts));
  }
  const std::vector<float> weights(ids.size(), 0.5F);
  const RouteInput in{ConstTensorView(ids.data(), DType::kInt32, {kNumTokens, kNumTopk}),
                      ConstTensorView(weights.data(), DType::kFloat32, {kNumTokens, kNumTopk})};
  RouteOptions options;
  options.num_experts = kNumExperts;
  options.layout = layout;
  Routing routing;
  for (int repeat = 0; repeat < 3; ++repeat) {  // memory must not grow from call to call
    Result<Routing> routed = group.route(in, options);
    if (!context.expect_ok(routed.status(), "route")) return;
    routing = *routed;
  }
  const std::int64_t rows = routing.num_recv_rows();
  constexpr std::int64_t kRowBytes = kHidden * 2;
  Memory x = Memory::take(group, symmetric, kNumTokens * kRowBytes);
  Memory received = Memory::take(group, symmetric, rows * kRowBytes);
  Memory returned = Memory::take(group, symmetric, rows * kRowBytes);
  std::vector<float> scales(to_size(kNumTokens * kScaleWidth)), out_scales(to_size(rows * kScaleWidth));
  const bool by_token = layout == Layout::kTokens;
  std::vector<float> out_weights(to_size(rows * kNumTopk));
  std::vector<std::uint8_t> combined(to_size(kNumTokens * kRowBytes));
  for (int repeat = 0; repeat < 3; ++repeat) {
    DispatchInput input;
    input.x = ConstTensorView(x.data(), DType::kBfloat16, {kNumTokens, kHidden});
    input.scales = ConstTensorView(scales.data(), DType::kFloat32, {kNumTokens, kScaleWidth});
    DispatchOutput output;
    output.x = TensorView(received.data(), DType::kBfloat16, {rows, kHidden});
    output.scales = TensorView(out_scales.data(), DType::kFloat32, {rows, kScaleWidth});
    output.topk_weights = by_token ? TensorView(out_weights.data(), DType::kFloat32, {rows, kNumTopk})
                                   : TensorView(out_weights.data(), DType::kFloat32, {rows});
    if (!context.expect_ok(group.dispatch(routing, input, output), "dispatch")) return;
    CombineInput back;
    back.x = ConstTensorView(returned.data(), DType::kBfloat16, {rows, kHidden});
    back.weights = output.topk_weights;
    CombineOutput sum;
    sum.x = TensorView(combined.data(), DType::kBfloat16, {kNumTokens, kHidden});
    std::vector<float> summed_weights(ids.size());
    sum.weights = TensorView(summed_weights.data(), DType::kFloat32, {kNumTokens, kNumTopk});
    if (!context.expect_ok(group.combine(routing, back, sum), "combine")) return;
  }

  MemoryShape shape;
  shape.num_ranks = context.num_ranks();
  shape.num_experts = kNumExperts;
  shape.num_tokens = kNumTokens;
  shape.num_topk = kNumTopk;
  shape.num_recv_rows = rows;
  shape.row_bytes = kRowBytes;
  shape.scale_row_bytes = kScaleWidth * 4;
  shape.layout = layout;
  shape.weights = true;
  shape.symmetric = symmetric;
  const std::size_t required = bytes_required(shape).value();
  constexpr std::size_t kProbeBytes = 4096;
  const std::size_t held = group.memory_usage().total_bytes() - kProbeBytes;
  context.expect(held == required, fmt::format("holds {} bytes, bytes_required() returns {}", held, required));
  const auto resident = static_cast<double>(resident_bytes_of_arena(probe.data()) - kProbeBytes);
  const double error = std::abs(resident - static_cast<double>(required)) / static_cast<double>(required);
  context.expect(error <= 0.02, fmt::format("{} bytes are resident, bytes_required() returns {}", resident, required));

  for (Memory* memory : {&x, &received, &returned}) *memory = Memory();
  context.expect(group.memory_usage().allocated_bytes == kProbeBytes, "freed buffers are returned to the arena");
  const auto left = resident_bytes_of_arena(probe.data());
  const std::size_t expected_left = group.memory_usage().total_bytes();
  context.expect(left <= expected_left,
                 fmt::format("{} bytes are resident after buffers are freed, expected {}", left, expected_left));
  context.expect_ok(group.destroy(), "destroy");
}

TEST(Memory, MatchesTheFormulaWithSymmetricBuffers) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4},
            [](RankContext& context) { check_memory(context, Layout::kTokens, true); });
}

TEST(Memory, MatchesTheFormulaWithOrdinaryPointers) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4},
            [](RankContext& context) { check_memory(context, Layout::kTokens, false); });
}

TEST(Memory, MatchesTheFormulaForExpertRows) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4},
            [](RankContext& context) { check_memory(context, Layout::kExperts, true); });
}

/// Rows in ordinary memory, which processes reach through staging, so that the arena grows to several megabytes.
ExchangeCase staged_batch() {
  ExchangeCase spec;
  spec.name = "staged batch";
  spec.world = {.num_ranks = 4, .num_topk = 4, .num_experts = 16, .max_tokens = 300};
  spec.memory = MemoryKind::kPlain;
  spec.dispatches = {{.hidden = 4096, .num_scales = 16}};
  spec.combines = {{.hidden = 4096, .return_weights = true}};
  return spec;
}

TEST(Memory, TrimGivesPagesBackToTheSystem) {
  const PreparedCase batch = prepare(staged_batch());
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4}, [&](RankContext& context) {
    Result<std::shared_ptr<Group>> created = Group::create(context.bootstrap(), {.backend = "cpu"});
    if (!context.expect_ok(created.status(), "create")) return;
    Group& group = **created;
    const Buffer probe = group.allocate(1).value();
    const std::size_t at_first = resident_bytes_of_arena(probe.data());
    for (int repeat = 0; repeat < 3; ++repeat) {
      check_case(context, group, batch);
      const std::size_t grown = resident_bytes_of_arena(probe.data());
      context.expect(grown >= at_first + (std::size_t{2} << 20), fmt::format("only {} bytes are resident", grown));
      // Peers may still be waiting for this rank's end of the call, or may have trimmed already.
      context.expect_ok(group.trim(), "trim");
      const std::size_t trimmed = resident_bytes_of_arena(probe.data());
      context.expect(trimmed == at_first,
                     fmt::format("{} bytes are resident after trim, {} at first, {} before", trimmed, at_first, grown));
    }
    context.expect_ok(group.destroy(), "destroy");
  });
}

// Peers that have not noticed the loss may still read or write staging memory.
TEST(Memory, TrimLeavesABrokenGroupAlone) {
  const PreparedCase batch = prepare(staged_batch());
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4}, [&](RankContext& context) {
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), {.backend = "cpu"});
    if (!context.expect_ok(group.status(), "create")) return;
    check_case(context, **group, batch);
    if (context.rank() == 1) return;  // leaves without notice
    const std::size_t before = (*group)->memory_usage().staging_bytes;
    const std::vector<std::int64_t> ids(4, 0);
    RouteOptions route;
    route.num_experts = 16;
    const RouteInput in{ConstTensorView(ids.data(), DType::kInt64, {1, 4}), {}};
    context.expect_code((*group)->route(in, route).status(), ErrorCode::kPeerLost, "route");
    context.expect_code((*group)->trim(), ErrorCode::kPeerLost, "trim");
    context.expect((*group)->memory_usage().staging_bytes >= before, "trim gave memory back");
  });
}

TEST(Memory, RefusesAbsurdShapes) {
  MemoryShape shape;
  shape.num_tokens = -1;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument);
  shape.num_tokens = 1;
  shape.num_ranks = 0;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument);
  shape.num_ranks = 6;
  shape.ranks_per_node = 4;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "not a divisor";
  shape.ranks_per_node = 3;
  EXPECT_TRUE(bytes_required(shape).ok());
  shape.num_node_tokens = 2;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "more than all tokens";
  shape.num_node_tokens = 1;
  shape.num_used_rows = 1;
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kInvalidArgument) << "more than all rows";
  shape.num_used_rows = -1;
  shape.backend = "tpu";
  EXPECT_EQ(bytes_required(shape).status().code(), ErrorCode::kUnsupported);
}

TEST(Memory, AFullArenaIsACapacityErrorThatLeavesTheGroupUsable) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 2}, [](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.arena_bytes = 1 << 20;
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    Result<Buffer> all = (*group)->allocate(1 << 20);
    context.expect_ok(all.status(), "the whole arena");
    context.expect_code((*group)->allocate(1).status(), ErrorCode::kCapacity, "one byte more");
    const std::int64_t id = 0;
    const RouteInput in{ConstTensorView(&id, DType::kInt64, {1, 1}), {}};
    RouteOptions route;
    route.num_experts = 2;
    context.expect_code((*group)->route(in, route).status(), ErrorCode::kCapacity, "route needs room for its tables");
    all = Buffer();
    context.expect_ok((*group)->route(in, route).status(), "with room again");
  });
}

}  // namespace
}  // namespace ferry::test

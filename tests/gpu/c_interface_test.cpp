/// The C interface on GPUs: streams, bounded rows, errors reported by wait, latency mode. Results of calls are tested
/// through the C++ interface, on which it is built.

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "c/handles.hpp"
#include "ferry/known_memory.hpp"
#include "ferry/launches.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/on_device.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kNumTokens = 6;  // T
constexpr std::int64_t kHidden = 32;    // H
constexpr std::int64_t kNumTopk = 2;    // K
constexpr int kNumRanks = 2;
constexpr std::int64_t kNumExperts = 4;                     // E, two per rank
constexpr std::int64_t kCapacity = kNumRanks * kNumTokens;  // C
constexpr std::int64_t kNumRows = kNumExperts / kNumRanks * kCapacity;

bool succeeded(RankContext& context, ferry_status* status, const std::string& what) {
  const bool good = context.expect(status == nullptr, what + ": " + ferry_status_message(status));
  ferry_status_free(status);
  return good;
}

ferry_tensor matrix(void* data, std::int32_t dtype, std::int64_t rows, std::int64_t columns) {
  ferry_tensor view{};
  view.data = data;
  view.dtype = dtype;
  view.num_dims = 2;
  view.shape[0] = rows;
  view.shape[1] = columns;
  return view;
}

/// One rank's tokens. Experts return their input, so an unweighted sum is K times the token, and a weighted sum with
/// weights of one half is the token itself.
struct Batch {
  explicit Batch(int rank) : x(tokens(rank)) {}
  static std::vector<float> tokens(int rank) {
    std::vector<float> made(static_cast<std::size_t>(kNumTokens * kHidden));
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<float>(i % 23) + static_cast<float>(rank);
    return made;
  }
  static std::vector<std::int32_t> ids(std::int32_t first) {
    std::vector<std::int32_t> made;
    for (std::int32_t i = 0; i < kNumTokens * kNumTopk; ++i) made.push_back((first + i) % kNumExperts);
    return made;
  }
  void expect_sums(RankContext& context, float factor, const std::string& what) {
    std::vector<float> sums(x.size());
    out.read(sums);
    for (float& sum : sums) sum /= factor;
    context.expect(sums == x, what);
  }

  std::vector<float> x;
  OnDevice<float> x_there{x};
  OnDevice<std::int32_t> topk_idx{ids(1)};
  OnDevice<float> topk_weights{std::vector<float>(static_cast<std::size_t>(kNumTokens * kNumTopk), 0.5F)};
  OnDevice<float> out{std::vector<float>(x.size(), -1.0F)};
};

void run_throughput(RankContext& context, ferry_group* group, Batch& batch, void* stream) {
  ferry_buffer* slab = nullptr;
  if (!succeeded(context, ferry_group_allocate(group, kNumRows * kHidden * sizeof(float), &slab), "allocate")) return;
  ferry_route_input choice{};
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(batch.topk_idx.data(), FERRY_INT32, kNumTokens, kNumTopk);
  ferry_route_options options{};
  options.struct_size = sizeof(options);
  options.num_experts = kNumExperts;
  options.layout = FERRY_LAYOUT_SLAB;
  options.slab_capacity = kCapacity;
  ferry_routing* routing = nullptr;
  if (!succeeded(context, ferry_route(group, &choice, &options, stream, &routing), "route")) return;
  ferry_dispatch_input send{};
  send.struct_size = sizeof(send);
  send.x = matrix(batch.x_there.data(), FERRY_FLOAT32, kNumTokens, kHidden);
  ferry_dispatch_output receive{};
  receive.struct_size = sizeof(receive);
  receive.x = matrix(ferry_buffer_data(slab), FERRY_FLOAT32, kNumRows, kHidden);
  ferry_combine_input results{};
  results.struct_size = sizeof(results);
  results.x = receive.x;
  ferry_combine_output sums{};
  sums.struct_size = sizeof(sums);
  sums.x = matrix(batch.out.data(), FERRY_FLOAT32, kNumTokens, kHidden);
  succeeded(context, ferry_dispatch(group, routing, &send, &receive, nullptr, stream), "dispatch");
  succeeded(context, ferry_combine(group, routing, &results, &sums, nullptr, stream), "combine");
  if (succeeded(context, ferry_group_wait(group, stream), "wait")) batch.expect_sums(context, kNumTopk, "combine");
  context.expect(ferry_routing_num_used_rows(routing) == kNumRows, "rows in use");
  ferry_routing_free(routing);
  ferry_buffer_free(slab);
}

void run_latency(RankContext& context, ferry_group* group, Batch& batch, void* stream) {
  OnDevice<float> slab{std::vector<float>(static_cast<std::size_t>(kNumRows * kHidden))};
  ferry_latency_dispatch_input send{};
  send.struct_size = sizeof(send);
  send.x = matrix(batch.x_there.data(), FERRY_FLOAT32, kNumTokens, kHidden);
  send.topk_idx = matrix(batch.topk_idx.data(), FERRY_INT32, kNumTokens, kNumTopk);
  send.topk_weights = matrix(batch.topk_weights.data(), FERRY_FLOAT32, kNumTokens, kNumTopk);
  ferry_latency_dispatch_output receive{};
  receive.struct_size = sizeof(receive);
  receive.x = matrix(slab.data(), FERRY_FLOAT32, kNumRows, kHidden);
  ferry_latency_dispatch_options options{};
  options.struct_size = sizeof(options);
  options.num_experts = kNumExperts;
  options.max_tokens = kNumTokens;
  options.slab_capacity = kCapacity;
  options.split = 1;
  ferry_routing* routing = nullptr;
  ferry_status* status = ferry_latency_dispatch(group, &send, &receive, &options, stream, &routing);
  if (!succeeded(context, status, "latency_dispatch")) return;
  succeeded(context, ferry_latency_receive(group, routing, stream), "latency_receive");
  ferry_latency_combine_input results{};
  results.struct_size = sizeof(results);
  results.x = receive.x;
  ferry_latency_combine_output sums{};
  sums.struct_size = sizeof(sums);
  sums.x = matrix(batch.out.data(), FERRY_FLOAT32, kNumTokens, kHidden);
  succeeded(context, ferry_latency_combine(group, routing, &results, &sums, nullptr, stream), "latency_combine");
  if (succeeded(context, ferry_group_wait(group, stream), "wait")) batch.expect_sums(context, 1, "latency_combine");
  ferry_routing_free(routing);
}

/// Memory that route writes while it ends, and the number of times it requested it.
struct Early {
  OnDevice<std::int32_t> rank_prefix{std::vector<std::int32_t>(kNumRanks * kNumRanks, -7)};
  OnDevice<std::int32_t> source_token{std::vector<std::int32_t>(kNumRanks * kNumTokens, -7)};
  int num_calls = 0;
};

void ask_for_tables(void* user, ferry_early_tables* tables) {
  auto& early = *static_cast<Early*>(user);
  ++early.num_calls;
  if (tables->struct_size < sizeof(*tables)) return;
  tables->num_channels = 1;
  tables->rank_prefix = matrix(early.rank_prefix.data(), FERRY_INT32, kNumRanks, kNumRanks);
  tables->source_token = matrix(early.source_token.data(), FERRY_INT32, kNumRanks * kNumTokens, 0);
  tables->source_token.num_dims = 1;
}

std::atomic<int> num_launches{0};

void count_launch(const KernelLaunch& launch) {
  const bool is_good = launch.num_blocks > 0 && launch.num_threads > 0;
  num_launches.fetch_add(is_good ? 1 : 1'000'000);
}

ferry_status* route(ferry_group* group, Batch& batch, std::int64_t max_recv_rows, Early* early, void* stream,
                    ferry_routing** routing) {
  ferry_route_input choice{};
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(batch.topk_idx.data(), FERRY_INT32, kNumTokens, kNumTopk);
  ferry_route_options options{};
  options.struct_size = sizeof(options);
  options.num_experts = kNumExperts;
  options.max_recv_rows = max_recv_rows;
  if (early != nullptr) {
    options.while_waiting = ask_for_tables;
    options.user = early;
  }
  return ferry_route(group, &choice, &options, stream, routing);
}

/// Every token has an expert on each rank.
void run_early_tables(RankContext& context, ferry_group* group, Batch& batch, void* stream) {
  Early early;
  ferry_routing* routing = nullptr;
  ferry_known_memory_begin();
  context.expect(KnownMemory::here(), "memory is known");
  const bool routed = succeeded(context, route(group, batch, 0, &early, stream, &routing), "route");
  ferry_known_memory_end();
  context.expect(!KnownMemory::here(), "memory is no longer known");
  if (!routed) return;
  synchronize(Stream{stream});
  std::vector<std::int32_t> prefix(kNumRanks * kNumRanks);
  early.rank_prefix.read(prefix);
  std::vector<std::int32_t> tokens(kNumRanks * kNumTokens);
  early.source_token.read(tokens);
  context.expect(early.num_calls == 1, "memory requested once while route waited");
  context.expect(prefix == std::vector<std::int32_t>{6, 6, 12, 12}, "rows from ranks up to each");
  context.expect(tokens == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5}, "the token of each row");
  ferry_routing_free(routing);
}

void run_refused(RankContext& context, ferry_group* group, Batch& batch, void* stream) {
  constexpr std::int64_t kFewRows = 5;
  ferry_routing* routing = nullptr;
  if (!succeeded(context, route(group, batch, kFewRows, nullptr, stream, &routing), "route of too many rows")) return;
  OnDevice<float> rows{std::vector<float>(static_cast<std::size_t>(kFewRows * kHidden))};
  OnDevice<std::int32_t> source{std::vector<std::int32_t>(static_cast<std::size_t>(kFewRows * 2), 5)};
  ferry_dispatch_input send{};
  send.struct_size = sizeof(send);
  send.x = matrix(batch.x_there.data(), FERRY_FLOAT32, kNumTokens, kHidden);
  ferry_dispatch_output receive{};
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows.data(), FERRY_FLOAT32, kFewRows, kHidden);
  receive.source = matrix(source.data(), FERRY_INT32, kFewRows, 2);
  ferry_dispatch_options options{};
  options.struct_size = sizeof(options);
  options.clear_if_refused = 1;
  ferry_status_free(ferry_dispatch(group, routing, &send, &receive, &options, stream));
  ferry_status* const status = ferry_group_wait(group, stream);
  context.expect(ferry_status_code(status) == FERRY_ERROR_CAPACITY, "too many rows");
  ferry_status_free(status);
  std::vector<std::int32_t> seen(static_cast<std::size_t>(kFewRows * 2));
  source.read(seen);
  context.expect(seen == std::vector<std::int32_t>(seen.size(), -1), "indices after a refused call");
  ferry_routing_free(routing);
}

void run_rank(RankContext& context) {
  ferry_latency_shape shape{};
  shape.struct_size = sizeof(shape);
  shape.backend = "cuda";
  shape.max_tokens = kNumTokens;
  shape.num_ranks = context.num_ranks();
  shape.num_topk = kNumTopk;
  shape.dispatch_row_bytes = shape.combine_row_bytes = kHidden * sizeof(float);
  ferry_group_options options{};
  options.struct_size = sizeof(options);
  options.backend = "cuda";
  options.arena_bytes = std::uint64_t{1} << 30;
  options.timeout_ns = 30 * kNsPerSecond;
  options.use_device = 1;
  options.device = device_of_rank(context.rank());
  succeeded(context, ferry_latency_bytes_required(&shape, &options.latency_bytes), "latency_bytes_required");
  ferry_bootstrap bootstrap{context.bootstrap()};
  ferry_group* group = nullptr;
  if (!succeeded(context, ferry_group_create(&bootstrap, &options, &group), "group_create")) return;
  context.expect(std::string(ferry_group_backend(group)) == "cuda", "not a CUDA group");
  Batch batch(context.rank());
  const RankStream stream(context);
  observe_launches(count_launch);
  run_throughput(context, group, batch, stream.get().handle);
  const int launched = num_launches.load();
  context.expect(launched >= 3 && launched < 1'000'000, "route, dispatch and combine launch kernels");
  run_early_tables(context, group, batch, stream.get().handle);
  run_latency(context, group, batch, stream.get().handle);
  run_refused(context, group, batch, stream.get().handle);
  meet(context);
  observe_launches(nullptr);
  succeeded(context, ferry_group_destroy(group), "group_destroy");
  ferry_group_free(group);
}

TEST(CInterface, TwoThreads) { run_gpu_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, run_rank); }
TEST(CInterface, TwoProcesses) { run_gpu_ranks({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, run_rank); }

}  // namespace
}  // namespace ferry::test

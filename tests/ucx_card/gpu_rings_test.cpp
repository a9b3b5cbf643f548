/// Groups of emulated GPUs over nodes whose rings are in GPU memory, which stand-ins for cards write and read.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "cuda/latency/far_message.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"
#include "support/group_memory.hpp"
#include "support/latency_check.hpp"
#include "ucx_card/hosts.hpp"
#include "ucx_card/rounds.hpp"
#include "ucx_card/variable.hpp"

namespace ferry::test {
namespace {

struct Rings {
  const char* name;
  int num_nodes;
  int ranks_per_node;
  const char* memory = "gpu";
  bool read_back = false;
  RankKind kind = RankKind::kThreads;
  const char* card = "seed=5,latency_ns=100000,piece_bytes=512";
  const char* order = "flush";
  int num_ranks() const { return num_nodes * ranks_per_node; }
};
void PrintTo(const Rings& rings, std::ostream* out) { *out << rings.name; }

/// Leaves room for the kernels that copy for cards where ranks share a GPU. Emulated GPUs have no such kernels, and few
/// multiprocessors.
int reserved_sms() {
  constexpr int kSmsOfCopies = 32;
  int num_sms = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0);
  return error == cudaSuccess && num_sms > 2 * kSmsOfCopies ? kSmsOfCopies : kDefaultReservedSms;
}

GroupOptions options_of(const Rings& rings) {
  GroupOptions options = gpu_group_options();
  options.ranks_per_node = rings.ranks_per_node;
  options.transport = "ucx";
  options.ring_memory = rings.memory;
  options.num_reserved_sms = reserved_sms();
  return options;
}

/// Runs `body` on ranks whose nodes are hosts of their own.
void run_on_hosts(const Rings& rings, const RankBody& body) {
  run_gpu_ranks({rings.kind, rings.num_ranks()}, [&](RankContext& context) {
    enter_host(context.rank() / rings.ranks_per_node);
    body(context);
  });
}

class UcxCardRings : public testing::TestWithParam<Rings> {
 protected:
  /// GPUs that see writes out of order see none before a card reads.
  CardSettings settings_{fmt::format("{}{}", GetParam().card, GetParam().read_back ? ",gpu_lag=1" : "")};
  Variable writes_order_{"FERRY_EMULATED_WRITES_ORDER", GetParam().read_back ? "0" : "100"};
  Variable order_{"FERRY_CARD_ORDER", GetParam().order};

  static void run(GroupOptions options, const std::function<void(RankContext&, Group&)>& body) {
    run_on_hosts(GetParam(), [&](RankContext& context) {
      auto group = Group::create(context.bootstrap(), options);
      if (!context.expect_ok(group.status(), "Group::create")) return;
      const NetworkUsage usage = (*group)->network_usage();
      context.expect(usage.ring_memory == GetParam().memory, "rings in " + usage.ring_memory + " memory");
      for (const auto& rail : usage.rails) {
        context.expect(rail.route.find("rc_mlx5") != std::string::npos, "a rail over " + rail.route);
      }
      body(context, **group);
      context.expect_ok((*group)->destroy(), "destroy");
    });
  }
};

TEST_P(UcxCardRings, ExchangesAreTheOracles) {
  std::mt19937_64 random(31);
  std::vector<PreparedCase> cases;
  for (int i = 0; i < 2; ++i) {
    ExchangeCase spec = draw_case(random, GetParam().num_ranks());
    spec.world.num_ranks = GetParam().num_ranks();
    spec.world.ranks_per_node = GetParam().ranks_per_node;
    cases.push_back(prepare(spec));
  }
  run(options_of(GetParam()), [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

/// More rows than the rings hold, so that chunks are reused.
TEST_P(UcxCardRings, ManyTimesWhatTheRingsHold) {
  ExchangeCase spec;
  spec.name = "many rows";
  spec.world = {.num_topk = 2, .num_experts = 4, .max_tokens = 1500};
  spec.world.num_ranks = GetParam().num_ranks();
  spec.world.ranks_per_node = GetParam().ranks_per_node;
  spec.dispatches = {{.hidden = 8192}};
  spec.combines = {{.hidden = 8192, .weighted = true}};
  const PreparedCase prepared = prepare(spec);
  run(options_of(GetParam()), [&](RankContext& context, Group& group) { check_case(context, group, prepared); });
}

TEST_P(UcxCardRings, LatencyCallsAreTheOracles) {
  std::vector<PreparedCase> cases;
  for (const std::int64_t hidden : {std::int64_t{64}, std::int64_t{1040}, std::int64_t{4112}}) {
    cases.push_back(
        latency_cases_of_equal_shapes(GetParam().num_ranks(), 1, true, GetParam().ranks_per_node, hidden).front());
  }
  GroupOptions options = options_of(GetParam());
  options.latency_bytes = latency_bytes_of("cuda", cases);
  run(options, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) {
      check_latency_case(context, group, one, Halves::kTogether);
      check_latency_case(context, group, one, Halves::kSplit);
    }
  });
}

/// Rows of few tokens travel as words, of many behind a number that is put after them; sums do so if a rank may have
/// more tokens. Dispatches of the fewest have kernels of their own.
TEST_P(UcxCardRings, LatencyCallsOfFewAndOfManyTokensAreTheOracles) {
  struct Tokens {
    std::int64_t most = 0;
    std::int64_t spare = 0;
  };
  std::vector<PreparedCase> cases;
  for (const Tokens tokens : {Tokens{4}, Tokens{12}, Tokens{60}, Tokens{60, 2 * cuda::kFarSumTokens}}) {
    for (const Quantization quantize : {Quantization::kFp8, Quantization::kFp8Ue8m0}) {
      ExchangeCase spec;
      spec.name = fmt::format("{} tokens and {} more", tokens.most, tokens.spare);
      spec.world = {.num_topk = 4, .num_experts = 8, .max_tokens = tokens.most};
      spec.spare_max_tokens = tokens.spare;
      spec.world.num_ranks = GetParam().num_ranks();
      spec.world.ranks_per_node = GetParam().ranks_per_node;
      spec.world.layout = Layout::kSlab;
      // Scales begin a step of words.
      const bool exponents = quantize == Quantization::kFp8Ue8m0;
      spec.dispatches = {
          {.hidden = 2048, .quantize = quantize, .scale_dtype = exponents ? DType::kUint8 : DType::kFloat32}};
      for (const bool own_weights : {false, true}) {
        spec.combines.push_back({.hidden = 2048,
                                 .weighted = true,
                                 .order = own_weights ? CombineOrder::kRankSums : CombineOrder::kExact,
                                 .own_weights = own_weights});
      }
      cases.push_back(prepare(spec));
    }
  }
  std::int64_t most_tokens = 0;
  for (int rank = 0; rank < GetParam().num_ranks(); ++rank) {
    most_tokens = std::max(most_tokens, cases.back().num_tokens(rank));
  }
  ASSERT_GT(most_tokens, cuda::kFarWordTokens);
  GroupOptions options = options_of(GetParam());
  options.latency_bytes = latency_bytes_of("cuda", cases);
  run(options, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_latency_case(context, group, one, Halves::kTogether);
  });
}

/// A rank that refuses sends no counts: threads that wait for them learn it from its header. With so many experts those
/// of a small dispatch that wait for headers wait for counts too, and where waits are counted they begin to wait at
/// once.
TEST_P(UcxCardRings, LatencyCallsThatARankRefusesAreTheErrorOfAll) {
  ExchangeCase spec;
  spec.name = "many experts";
  spec.world = {.num_topk = 4, .num_experts = 512, .max_tokens = 4};
  spec.world.num_ranks = GetParam().num_ranks();
  spec.world.ranks_per_node = GetParam().ranks_per_node;
  spec.world.layout = Layout::kSlab;
  spec.dispatches = {{.hidden = 64}};
  spec.combines = {{.hidden = 64, .weighted = true, .order = CombineOrder::kRankSums}};
  const PreparedCase good = prepare(spec);
  GroupOptions options = options_of(GetParam());
  options.latency_bytes = latency_bytes_of("cuda", {good});
  const int bad_rank = GetParam().num_ranks() - 1;
  run(options, [&](RankContext& context, Group& group) {
    const std::vector<std::int64_t> zeros(static_cast<std::size_t>(group.num_ranks()));
    for (const bool split : {false, true}) {
      LatencyDispatchTensors tensors(context, group, good, 0);
      tensors.options.split = split;
      PlainMemory times(true, zeros);
      tensors.options.wait_times_ns = {times.data(), DType::kInt64, {group.num_ranks()}};
      if (context.rank() == bad_rank) tensors.options.slab_capacity = 0;
      const Stream stream = stream_of(group);
      const Result<Routing> sent = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream);
      const bool receives = sent.ok() && split;
      const Status status = finish(group, receives ? group.latency_receive(*sent, stream) : sent.status());
      context.expect(status.code() == ErrorCode::kInvalidArgument, status.to_string());
      const std::string name = fmt::format("rank {}: latency_dispatch: slab_capacity", bad_rank);
      context.expect(status.message().find(name) != std::string_view::npos, status.to_string());
      check_latency_case(context, group, good, Halves::kTogether);
    }
  });
}

// Longer than emulated kernels take from a number that they see to the bytes that it tells of.
constexpr const char* kLate = "seed=5,latency_ns=60000000,piece_bytes=512";
constexpr const char* kSteady = "steady=1,rate=2000,latency_ns=3000";
constexpr const char* kSteadyWithoutThreads = "steady=1,thread=0,spin=1,rate=2000,latency_ns=3000";

INSTANTIATE_TEST_SUITE_P(
    , UcxCardRings,
    testing::Values(
        Rings{"gpu_2x1", 2, 1}, Rings{"gpu_2x2", 2, 2}, Rings{"gpu_read_back_2x1", 2, 1, "gpu", true},
        Rings{"host_2x1", 2, 1, "host"}, Rings{"gpu_steady_2x1", 2, 1, "gpu", false, RankKind::kThreads, kSteady},
        Rings{"gpu_steady_without_threads_2x1", 2, 1, "gpu", false, RankKind::kThreads, kSteadyWithoutThreads},
        Rings{.name = "gpu_fence_2x1", .num_nodes = 2, .ranks_per_node = 1, .card = kLate, .order = "fence"},
        Rings{.name = "gpu_fence_2x2", .num_nodes = 2, .ranks_per_node = 2, .card = kLate, .order = "fence"},
        Rings{.name = "gpu_fence_steady_2x1", .num_nodes = 2, .ranks_per_node = 1, .card = kSteady, .order = "fence"},
        Rings{.name = "gpu_fence_steady_without_threads_2x1",
              .num_nodes = 2,
              .ranks_per_node = 1,
              .card = kSteadyWithoutThreads,
              .order = "fence"},
        Rings{"gpu_read_back_2x1_processes", 2, 1, "gpu", true, RankKind::kProcesses}),
    [](const auto& instance) { return instance.param.name; });

constexpr Rings kTwoHosts{"two hosts", 2, 1};

TEST(UcxCardOrder, ThatIsNotKnownIsTheErrorOfAllRanks) {
  const CardSettings settings("seed=5");
  const Variable order("FERRY_CARD_ORDER", "weak");
  run_on_hosts(kTwoHosts, [](RankContext& context) {
    GroupOptions options = options_of(kTwoHosts);
    options.latency_bytes = std::size_t{1} << 20;
    const Status status = Group::create(context.bootstrap(), options).status();
    context.expect(status.code() == ErrorCode::kInvalidArgument, status.to_string());
    context.expect(status.message().find("FERRY_CARD_ORDER is \"weak\"") != std::string_view::npos, status.to_string());
  });
}

struct Refusal {
  const char* name;
  const char* settings;
  ErrorCode code;
  const char* words;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class UcxCardRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(UcxCardRefusal, IsTheErrorOfAllRanks) {
  const CardSettings settings(GetParam().settings);
  run_on_hosts(kTwoHosts, [](RankContext& context) {
    const Status status = Group::create(context.bootstrap(), options_of(kTwoHosts)).status();
    context.expect(status.code() == GetParam().code, status.to_string());
    context.expect(status.message().find(GetParam().words) != std::string_view::npos, status.to_string());
  });
}

INSTANTIATE_TEST_SUITE_P(, UcxCardRefusal,
                         testing::Values(Refusal{"registration", "fail=map_gpu,status=4", ErrorCode::kTransport,
                                                 "registering GPU memory: Out of memory"},
                                         Refusal{"no_card_between", "cards=0", ErrorCode::kUnsupported,
                                                 "only InfiniBand and RoCE cards write into GPU memory"},
                                         Refusal{"puts", "fail=put_gpu", ErrorCode::kUnsupported,
                                                 "network cards do not reach the GPU memory of rank"},
                                         Refusal{"puts_of_one_rank", "latency_ns=100000,end=0,fail=put_gpu",
                                                 ErrorCode::kUnsupported,
                                                 "network cards do not reach the GPU memory of rank"}),
                         [](const auto& instance) { return instance.param.name; });

TEST(UcxCardLink, ThatBreaksIsAnErrorOfBothRanksThatNamesTheOther) {
  const CardSettings settings("latency_ns=100000,fail=flush,fail_at=3,status=80,end=0");
  const PreparedCase prepared = exchange_between(2);
  run_on_hosts(kTwoHosts, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), options_of(kTwoHosts));
    if (!context.expect_ok(group.status(), "Group::create")) return;
    const Status status = exchange_rounds(context, **group, prepared, 20);
    context.expect(status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kTransport, status.to_string());
    context.expect(status.peer() == 1 - context.rank(), status.to_string());
  });
}

}  // namespace
}  // namespace ferry::test

/// Groups with GroupOptions::verify on GPUs: damage between a row's arrival and the kernel that checks it is found and
/// named, in calls and in replays of a graph, and right rows are never refused.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "ferry/launches.hpp"
#include "gpu/gpu_group.hpp"
#include "plan/to_size.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;

GroupOptions verifying_options() {
  GroupOptions options = gpu_group_options();
  options.verify = true;
  return options;
}

using Body = std::function<void(RankContext&, Group&)>;

void run_verifying(const Body& body) {
  run_gpu_ranks({RankKind::kThreads, kNumRanks}, [&body](RankContext& context) {
    auto group = Group::create(context.bootstrap(), verifying_options());
    if (context.expect_ok(group.status(), "Group::create")) body(context, **group);
    meet(context);  // no rank frees memory that another still reads
  });
}

PreparedCase one_case(Layout layout, MemoryKind memory) {
  ExchangeCase one;
  one.name = fmt::format("layout {}", static_cast<int>(layout));
  one.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 6, .max_tokens = 20};
  one.world.layout = layout;
  one.memory = memory;
  one.dispatches = {{.hidden = 64, .num_scales = 3, .ask_tables = true}};
  one.combines = {{.hidden = 64, .weighted = true, .return_weights = true}};
  return prepare(one);
}

/// Flips a bit in this thread's memory on the GPU ahead of one of its next launches, when the launches before have run.
class FlipBeforeLaunch {
 public:
  /// `num_before`: launches from now on that come before.
  FlipBeforeLaunch(int num_before, const void* at) : num_left_(num_before), at_(const_cast<void*>(at)) {
    current = this;
    observe_launches(observe);
  }
  ~FlipBeforeLaunch() { current = nullptr; }
  FlipBeforeLaunch(const FlipBeforeLaunch&) = delete;
  FlipBeforeLaunch& operator=(const FlipBeforeLaunch&) = delete;

  bool done() const { return num_left_ < 0; }

 private:
  static void observe(const KernelLaunch& /*launch*/) {
    if (current == nullptr || current->num_left_-- != 0) return;
    std::byte byte{};
    copy_from_device(&byte, current->at_, 1);
    byte ^= std::byte{0x10};
    copy_to_device(current->at_, &byte, 1);
  }

  static thread_local FlipBeforeLaunch* current;
  int num_left_;
  void* at_;
};
thread_local FlipBeforeLaunch* FlipBeforeLaunch::current = nullptr;

std::pair<int, int> source_of_row(const Routing& routing, std::int64_t row) {
  std::int32_t entry[2];
  copy_from_device(entry, static_cast<const std::int32_t*>(routing.source().data) + 2 * row, sizeof entry);
  return {entry[0], entry[1]};
}

void expect_texts(RankContext& context, const Status& status, const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    context.expect(status.message().find(text) != std::string_view::npos,
                   fmt::format("\"{}\" is not in: {}", text, status.message()));
  }
}

enum class Target { kPayload, kScales, kIds, kWeights };

struct Damage {
  const char* name;
  Layout layout;
  Target target;
};
void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class VerifiedDispatch : public testing::TestWithParam<Damage> {};

TEST_P(VerifiedDispatch, NamesTheDamagedRow) {
  static constexpr int kReceiver = 1;
  static constexpr std::int64_t kRow = 0;
  const PreparedCase prepared = one_case(GetParam().layout, MemoryKind::kSymmetric);
  run_verifying([&](RankContext& context, Group& group) {
    RouteArguments arguments(context, group, prepared);
    Result<Routing> routing = group.route(arguments.input(), arguments.options(), thread_stream());
    if (!context.expect_ok(routing.status(), "route")) return;
    DispatchTensors tensors(context, group, prepared, 0);
    const auto dispatch = [&] { return group.dispatch(*routing, tensors.in, tensors.out, thread_stream()); };
    context.expect_ok(dispatch(), "dispatch");
    context.expect_ok(group.wait(thread_stream()), "a dispatch without damage");
    if (context.rank() != kReceiver) {
      context.expect_ok(dispatch(), "dispatch");
      meet(context);
      Status status = group.route(arguments.input(), arguments.options(), thread_stream()).status();
      if (status.ok()) status = group.wait(thread_stream());
      context.expect_code(status, ErrorCode::kDataCorrupt, "the other rank's next call");
      return;
    }
    const DispatchOutput& out = tensors.out;
    const void* at = out.x.data;
    if (GetParam().target == Target::kScales) at = out.scales.data;
    if (GetParam().target == Target::kIds) at = out.topk_idx.data;
    if (GetParam().target == Target::kWeights) at = out.topk_weights.data;
    if (!context.expect(at != nullptr, "the target is an output")) return;
    const FlipBeforeLaunch flip(2, at);  // seal, dispatch, then the kernel that checks
    context.expect_ok(dispatch(), "dispatch");
    context.expect(flip.done(), "a bit was flipped");
    const Status status = group.wait(thread_stream());
    const auto [source, token] = source_of_row(*routing, kRow);
    if (context.expect_code(status, ErrorCode::kDataCorrupt, "wait")) {
      context.expect(status.peer() == source, fmt::format("peer is {}, expected {}", status.peer(), source));
      expect_texts(context, status,
                   {"dispatch (exchange ", fmt::format("row {} (token {} of rank {})", kRow, token, source),
                    fmt::format("hop rank {} -> rank {}; 1 rows", source, kReceiver)});
    }
    context.expect_code(dispatch(), ErrorCode::kDataCorrupt, "the next call");
    meet(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Damages, VerifiedDispatch,
                         testing::Values(Damage{"payload", Layout::kTokens, Target::kPayload},
                                         Damage{"scales", Layout::kTokens, Target::kScales},
                                         Damage{"ids", Layout::kTokens, Target::kIds},
                                         Damage{"weights", Layout::kTokens, Target::kWeights},
                                         Damage{"payload_by_expert", Layout::kExperts, Target::kPayload},
                                         Damage{"weights_by_expert", Layout::kExperts, Target::kWeights}),
                         [](const auto& test) { return test.param.name; });

class VerifiedCombine : public testing::TestWithParam<bool> {};

/// The parameter: whether a weight that returns is damaged, else a row.
TEST_P(VerifiedCombine, NamesTheHolder) {
  static constexpr int kHolder = 1;
  const PreparedCase prepared = one_case(Layout::kTokens, MemoryKind::kSymmetric);
  run_verifying([&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, prepared);
    CombineTensors tensors(context, group, prepared, 0);
    const auto combine = [&] {
      return group.combine(routing, tensors.in, tensors.out, thread_stream(), tensors.options);
    };
    context.expect_ok(combine(), "combine");
    context.expect_ok(group.wait(thread_stream()), "a combine without damage");
    tensors.expect_received(context, "combine");
    meet(context);
    bool flipped = context.rank() != kHolder;
    if (context.rank() == kHolder) {
      // After the launch that seals; the next one checks.
      const FlipBeforeLaunch flip(1, GetParam() ? tensors.in.weights.data : tensors.in.x.data);
      context.expect_ok(combine(), "combine");
      flipped = flip.done();
    } else {
      context.expect_ok(combine(), "combine");
    }
    context.expect(flipped, "a bit was flipped");
    meet(context);
    if (context.rank() == kHolder) {
      context.expect(source_of_row(routing, 0).first == 0, "rank 0 reads the damaged row");
      return;
    }
    const Status status = group.wait(thread_stream());
    if (context.expect_code(status, ErrorCode::kDataCorrupt, "wait")) {
      context.expect(status.peer() == kHolder, fmt::format("peer is {}", status.peer()));
      expect_texts(context, status,
                   {"combine (exchange ", fmt::format("row 0 of rank {} (token ", kHolder),
                    fmt::format("hop rank {} -> rank 0; 1 rows", kHolder)});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Damages, VerifiedCombine, testing::Values(false, true),
                         [](const auto& test) { return test.param ? "weights" : "rows"; });

/// Right rows pass in replays, too, in which checksums of the replay before lie in the same memory.
TEST(VerifiedGraph, RightRowsPass) {
  for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    std::vector<PreparedCase> cases;
    for (int replay = 0; replay < 4; ++replay) {
      ExchangeCase one;
      one.name = fmt::format("replay {}", replay);
      one.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 10, .max_tokens = 16};
      one.world.seed = static_cast<std::uint64_t>(500 + replay);
      one.world.fixed_rows = 16 * kNumRanks;
      one.memory = memory;
      one.dispatches = {{.hidden = 272, .quantize = Quantization::kFp8, .zero_padding = true}};
      one.combines = {{.hidden = 264, .weighted = true, .num_biases = 1, .return_weights = true}};
      cases.push_back(prepare(one));
    }
    run_verifying([&](RankContext& context, Group& group) {
      const RankStream stream(context);
      check_case(context, group, cases.back());
      Round round(context, group, cases.front());
      round.keep_routing = true;
      meet(context);
      CapturedGraph graph;
      graph.begin(stream.get());
      const bool captured = round.start(context, group, stream.get());
      graph.end();
      if (!captured) return;
      graph.prepare();
      for (const PreparedCase& one : cases) {
        round.refill(context, one);
        meet(context);
        graph.launch();
        if (!context.expect_ok(group.wait(stream.get()), one.spec.name)) return;
        round.expect_received(context);
      }
      meet(context);
    });
  }
}

TEST(VerifyOnGpus, IsRefusedWhereItIsNotCovered) {
  run_gpu_ranks({RankKind::kThreads, kNumRanks}, [](RankContext& context) {
    GroupOptions options = verifying_options();
    options.latency_bytes = std::size_t{1} << 20;
    Status status = Group::create(context.bootstrap(), options).status();
    context.expect_code(status, ErrorCode::kUnsupported, "latency mode");
    expect_texts(context, status, {"latency_bytes is 1048576, expected 0"});
    options = verifying_options();
    options.ranks_per_node = 1;
    options.transport = "loopback";
    status = Group::create(context.bootstrap(), options).status();
    context.expect_code(status, ErrorCode::kUnsupported, "several nodes");
    expect_texts(context, status, {"the 2 GPU ranks are on 2 nodes"});
  });
}

}  // namespace
}  // namespace ferry::test

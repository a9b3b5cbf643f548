#include <fmt/format.h>

#include <limits>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;

/// One way to make a call invalid. One rank makes the invalid call while the others make a valid one: every rank must
/// refuse it in the same way, write nothing, and continue unaffected.
template <typename... Arguments>
struct Mistake {
  std::string name;
  std::function<void(Arguments&...)> spoil;
};

class BadInputConformance : public Conformance {
 protected:
  PreparedCase good_case(Layout layout) const {
    ExchangeCase spec;
    spec.name = "good case";
    spec.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 6, .max_tokens = 4, .layout = layout};
    spec.dispatches = {{.dtype = DType::kBfloat16, .hidden = 16, .num_scales = 3}};
    spec.combines = {{.hidden = 16, .weighted = true, .num_biases = 2, .return_weights = true}};
    return prepare(spec);
  }

  static void expect_refusal(RankContext& context, const Status& status, int bad_rank, const std::string& what) {
    if (!context.expect_code(status, ErrorCode::kInvalidArgument, what)) return;
    context.expect(status.message().find(fmt::format("rank {}", bad_rank)) != std::string_view::npos,
                   fmt::format("{}: does not name rank {}: {}", what, bad_rank, status.message()));
  }
};

void spoil_view(std::vector<Mistake<ConstTensorView>>& mistakes, std::string name,
                std::function<void(ConstTensorView&)> spoil) {
  mistakes.push_back({std::move(name), std::move(spoil)});
}

/// Mistakes that any required view of two dimensions can have.
std::vector<Mistake<ConstTensorView>> view_mistakes() {
  std::vector<Mistake<ConstTensorView>> all;
  spoil_view(all, "null pointer", [](ConstTensorView& view) { view.data = nullptr; });
  spoil_view(all, "misaligned",
             [](ConstTensorView& view) { view.data = static_cast<const std::byte*>(view.data) + 1; });
  spoil_view(all, "a row more", [](ConstTensorView& view) { view.shape[0] += 1; });
  spoil_view(all, "a row less", [](ConstTensorView& view) { view.shape[0] -= 1; });
  spoil_view(all, "negative rows", [](ConstTensorView& view) { view.shape[0] = -1; });
  spoil_view(all, "absurdly many rows",
             [](ConstTensorView& view) { view.shape[0] = std::numeric_limits<std::int64_t>::max(); });
  spoil_view(all, "absurdly wide",
             [](ConstTensorView& view) { view.shape[1] = std::numeric_limits<std::int64_t>::max(); });
  spoil_view(all, "one dimension", [](ConstTensorView& view) { view.num_dims = 1; });
  spoil_view(all, "seven dimensions", [](ConstTensorView& view) { view.num_dims = 7; });
  spoil_view(all, "negative dimensions", [](ConstTensorView& view) { view.num_dims = -2; });
  spoil_view(all, "unknown dtype", [](ConstTensorView& view) { view.dtype = static_cast<DType>(99); });
  return all;
}

void assign(ConstTensorView& to, const ConstTensorView& from) { to = from; }
void assign(TensorView& to, const ConstTensorView& from) {
  to.data = const_cast<void*>(from.data);
  to.dtype = from.dtype;
  to.num_dims = from.num_dims;
  to.shape = from.shape;
  to.strides = from.strides;
}

/// Applies the view mistakes to one view of a call.
template <typename... Arguments, typename Select>
void add_view_mistakes(std::vector<Mistake<Arguments...>>& mistakes, const std::string& name, Select select) {
  for (const Mistake<ConstTensorView>& mistake : view_mistakes()) {
    mistakes.push_back({name + ": " + mistake.name, [select, spoil = mistake.spoil](Arguments&... arguments) {
                          ConstTensorView view = select(arguments...);
                          spoil(view);
                          assign(select(arguments...), view);
                        }});
  }
}

TEST_P(BadInputConformance, Route) {
  using RouteMistake = Mistake<RouteInput, RouteOptions>;
  std::vector<RouteMistake> mistakes = {
      {"ids absent", [](RouteInput& in, RouteOptions&) { in.topk_idx = {}; }},
      {"ids strided", [](RouteInput& in, RouteOptions&) { in.topk_idx.strides[1] = 2; }},
      {"ids f32", [](RouteInput& in, RouteOptions&) { in.topk_idx.dtype = DType::kFloat32; }},
      {"K 0", [](RouteInput& in, RouteOptions&) { in.topk_idx.shape[1] = 0; }},
      {"K 33", [](RouteInput& in, RouteOptions&) { in.topk_idx.shape[1] = 33; }},
      {"weights absent on one rank", [](RouteInput& in, RouteOptions&) { in.topk_weights = {}; }},
      {"weights f16", [](RouteInput& in, RouteOptions&) { in.topk_weights.dtype = DType::kFloat16; }},
      {"weights strided", [](RouteInput& in, RouteOptions&) { in.topk_weights.strides[0] = 9; }},
      {"E 0", [](RouteInput&, RouteOptions& options) { options.num_experts = 0; }},
      {"E negative", [](RouteInput&, RouteOptions& options) { options.num_experts = -1; }},
      {"E absurd", [](RouteInput&, RouteOptions& options) { options.num_experts = std::int64_t{1} << 60; }},
      {"E differs", [](RouteInput&, RouteOptions& options) { options.num_experts = 7; }},
      {"layout 9", [](RouteInput&, RouteOptions& options) { options.layout = static_cast<Layout>(9); }},
      {"layout differs", [](RouteInput&, RouteOptions& options) { options.layout = Layout::kExperts; }},
      {"alignment 2^31",
       [](RouteInput&, RouteOptions& options) {
         options.layout = Layout::kExperts;
         options.expert_alignment = std::int64_t{1} << 31;
       }},
      {"alignment 0", [](RouteInput&, RouteOptions& options) { options.expert_alignment = 0; }},
      {"slab without capacity", [](RouteInput&, RouteOptions& options) { options.layout = Layout::kSlab; }},
      {"max_tokens negative", [](RouteInput&, RouteOptions& options) { options.max_tokens = -1; }},
      {"max_tokens without max_recv_rows", [](RouteInput&, RouteOptions& options) { options.max_tokens = 100; }},
      {"max_recv_rows negative", [](RouteInput&, RouteOptions& options) { options.max_recv_rows = -1; }},
      {"placement too short",
       [](RouteInput&, RouteOptions& options) {
         options.expert_to_rank = {0, 1};
       }},
      {"placement on no rank",
       [](RouteInput&, RouteOptions& options) { options.expert_to_rank = {0, 0, 1, 1, 2, kNumRanks}; }},
      {"placement differs", [](RouteInput&, RouteOptions& options) { options.expert_to_rank = {2, 2, 1, 1, 0, 0}; }},
  };
  add_view_mistakes(mistakes, "topk_weights",
                    [](RouteInput& in, RouteOptions&) -> ConstTensorView& { return in.topk_weights; });
  const PreparedCase good = good_case(Layout::kTokens);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (int bad_rank : {0, kNumRanks - 1}) {
      for (const RouteMistake& mistake : mistakes) {
        const RouteArguments arguments(context, group, good);
        RouteInput in = arguments.input();
        RouteOptions options = arguments.options();
        if (context.rank() == bad_rank) mistake.spoil(in, options);
        const Status status = finish(group, group.route(in, options, stream_of(group)).status());
        expect_refusal(context, status, bad_rank, mistake.name);
        if (mistake.name == "placement differs") {
          context.expect(status.message().find("expert_to_rank[0]: rank 0 has") != std::string_view::npos,
                         fmt::format("does not name the expert: {}", status.message()));
        }
      }
      check_case(context, group, good);
    }
  });
}

TEST_P(BadInputConformance, Ids) {
  using BadIds = std::pair<std::string, std::vector<std::int64_t>>;
  const std::vector<BadIds> mistakes = {
      {"id E", {0, 6, 0, 0, 0, 0, 0, 0}},
      {"id -2", {0, 0, 0, 0, 0, 0, 0, -2}},
      {"smallest id", std::vector<std::int64_t>(8, std::numeric_limits<std::int64_t>::min())},
      {"id 2^32", std::vector<std::int64_t>(8, std::int64_t{1} << 32)},
  };
  const PreparedCase good = good_case(Layout::kTokens);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (std::int64_t max_recv_rows : {0, 40}) {
      for (int bad_rank : {0, kNumRanks - 1}) {
        for (const auto& [name, ids] : mistakes) {
          const RouteArguments arguments(context, group, good);
          PlainMemory bad_ids(uses_device(group), ids);
          RouteInput in = arguments.input();
          RouteOptions options = arguments.options();
          options.max_recv_rows = max_recv_rows;
          if (context.rank() == bad_rank) in.topk_idx.data = bad_ids.data();
          const Status status = group.route(in, options, stream_of(group)).status();
          expect_refusal(context, finish(group, status), bad_rank, name);
        }
        check_case(context, group, good);
      }
    }
  });
}

TEST_P(BadInputConformance, SlabOptions) {
  const PreparedCase good = good_case(Layout::kSlab);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const RouteArguments arguments(context, group, good);
    const auto route = [&](const RouteOptions& options) {
      return finish(group, group.route(arguments.input(), options, stream_of(group)).status());
    };
    RouteOptions options = arguments.options();
    if (context.rank() == 1) options.slab_capacity += 1;
    expect_refusal(context, route(options), 1, "capacity differs");
    options = arguments.options();
    if (context.rank() == 2) options.max_recv_rows = 100;
    expect_refusal(context, route(options), 2, "max_recv_rows with a slab");
    check_case(context, group, good);
  });
}

TEST_P(BadInputConformance, Dispatch) {
  using DispatchMistake = Mistake<DispatchInput, DispatchOutput>;
  std::vector<DispatchMistake> mistakes = {
      {"x absent", [](DispatchInput& in, DispatchOutput&) { in.x = {}; }},
      {"x of another dtype", [](DispatchInput& in, DispatchOutput&) { in.x.dtype = DType::kFloat16; }},
      {"another dtype than the other ranks",
       [](DispatchInput& in, DispatchOutput& out) { in.x.dtype = out.x.dtype = DType::kFloat16; }},
      {"narrower rows than the other ranks",
       [](DispatchInput& in, DispatchOutput& out) { in.x.shape[1] = out.x.shape[1] = 8; }},
      {"rows of 30 bytes", [](DispatchInput& in, DispatchOutput& out) { in.x.shape[1] = out.x.shape[1] = 15; }},
      {"rows of 0 bytes", [](DispatchInput& in, DispatchOutput& out) { in.x.shape[1] = out.x.shape[1] = 0; }},
      {"x with inner stride 2", [](DispatchInput& in, DispatchOutput&) { in.x.strides[1] = 2; }},
      {"x with overlapping rows", [](DispatchInput& in, DispatchOutput&) { in.x.strides[0] = 8; }},
      {"x with a row stride of 34 bytes", [](DispatchInput& in, DispatchOutput&) { in.x.strides[0] = 17; }},
      {"x with a negative stride", [](DispatchInput& in, DispatchOutput&) { in.x.strides[0] = -16; }},
      {"output absent", [](DispatchInput&, DispatchOutput& out) { out.x = {}; }},
      {"output with a row stride of 34 bytes", [](DispatchInput&, DispatchOutput& out) { out.x.strides[0] = 17; }},
      {"output scales absent", [](DispatchInput&, DispatchOutput& out) { out.scales = {}; }},
      {"input scales absent", [](DispatchInput& in, DispatchOutput&) { in.scales = {}; }},
      {"no scales where the other ranks have some",
       [](DispatchInput& in, DispatchOutput& out) { in.scales = {}, out.scales = {}; }},
      {"fewer scales", [](DispatchInput& in, DispatchOutput&) { in.scales.shape[1] = 2; }},
      {"scales of f16",
       [](DispatchInput& in, DispatchOutput& out) { in.scales.dtype = out.scales.dtype = DType::kFloat16; }},
      {"scales of i32 on one rank",
       [](DispatchInput& in, DispatchOutput& out) { in.scales.dtype = out.scales.dtype = DType::kInt32; }},
      {"overlapping output scales", [](DispatchInput&, DispatchOutput& out) { out.scales.strides[0] = 0; }},
      {"ids of f32", [](DispatchInput&, DispatchOutput& out) { out.topk_idx.dtype = DType::kFloat32; }},
      {"ids absent on one rank", [](DispatchInput&, DispatchOutput& out) { out.topk_idx = {}; }},
      {"weights absent on one rank", [](DispatchInput&, DispatchOutput& out) { out.topk_weights = {}; }},
      {"strided weights", [](DispatchInput&, DispatchOutput& out) { out.topk_weights.strides[1] = 2; }},
      {"source of i64", [](DispatchInput&, DispatchOutput& out) { out.source.dtype = DType::kInt64; }},
      {"three columns of source", [](DispatchInput&, DispatchOutput& out) { out.source.shape[1] = 3; }},
      {"source absent on one rank", [](DispatchInput&, DispatchOutput& out) { out.source = {}; }},
      {"output over the input",
       [](DispatchInput& in, DispatchOutput& out) { out.x.data = const_cast<void*>(in.x.data); }},
      {"output over the second row of the input",
       [](DispatchInput& in, DispatchOutput& out) {
         out.x.data = static_cast<std::byte*>(const_cast<void*>(in.x.data)) + kRowGranuleBytes;
       }},
      {"output scales over the output", [](DispatchInput&, DispatchOutput& out) { out.scales.data = out.x.data; }},
      {"source over the output ids", [](DispatchInput&, DispatchOutput& out) { out.source.data = out.topk_idx.data; }},
  };
  add_view_mistakes(mistakes, "x", [](DispatchInput& in, DispatchOutput&) -> ConstTensorView& { return in.x; });
  add_view_mistakes(mistakes, "scales",
                    [](DispatchInput& in, DispatchOutput&) -> ConstTensorView& { return in.scales; });
  add_view_mistakes(mistakes, "output x", [](DispatchInput&, DispatchOutput& out) -> TensorView& { return out.x; });
  add_view_mistakes(mistakes, "output scales",
                    [](DispatchInput&, DispatchOutput& out) -> TensorView& { return out.scales; });
  add_view_mistakes(mistakes, "output topk_idx",
                    [](DispatchInput&, DispatchOutput& out) -> TensorView& { return out.topk_idx; });
  add_view_mistakes(mistakes, "output topk_weights",
                    [](DispatchInput&, DispatchOutput& out) -> TensorView& { return out.topk_weights; });
  add_view_mistakes(mistakes, "output source",
                    [](DispatchInput&, DispatchOutput& out) -> TensorView& { return out.source; });
  const PreparedCase good = good_case(Layout::kTokens);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    for (int bad_rank : {1, kNumRanks - 1}) {
      for (const DispatchMistake& mistake : mistakes) {
        DispatchTensors tensors(context, group, good, 0);
        if (context.rank() == bad_rank) mistake.spoil(tensors.in, tensors.out);
        const Status status = group.dispatch(routing, tensors.in, tensors.out, stream_of(group), tensors.options);
        expect_refusal(context, finish(group, status), bad_rank, mistake.name);
        tensors.expect_untouched(context, mistake.name + ": ");
      }
      check_dispatch(context, group, routing, good, 0);
    }
  });
}

TEST_P(BadInputConformance, Combine) {
  using CombineMistake = Mistake<CombineInput, CombineOutput, CombineOptions>;
  std::vector<CombineMistake> mistakes = {
      {"x absent", [](CombineInput& in, CombineOutput&, CombineOptions&) { in.x = {}; }},
      {"x of f16",
       [](CombineInput& in, CombineOutput& out, CombineOptions&) { in.x.dtype = out.x.dtype = DType::kFloat16; }},
      {"output of another dtype",
       [](CombineInput&, CombineOutput& out, CombineOptions&) { out.x.dtype = DType::kFloat32; }},
      {"output absent", [](CombineInput&, CombineOutput& out, CombineOptions&) { out.x = {}; }},
      {"narrower rows",
       [](CombineInput& in, CombineOutput& out, CombineOptions&) {
         in.x.shape[1] = out.x.shape[1] = 8;
         in.bias = {};
       }},
      {"bias of another dtype",
       [](CombineInput& in, CombineOutput&, CombineOptions&) { in.bias[1].dtype = DType::kFloat16; }},
      {"narrower bias", [](CombineInput& in, CombineOutput&, CombineOptions&) { in.bias[0].shape[1] = 8; }},
      {"weights without an output", [](CombineInput&, CombineOutput& out, CombineOptions&) { out.weights = {}; }},
      {"an output without weights", [](CombineInput& in, CombineOutput&, CombineOptions&) { in.weights = {}; }},
      {"no weights where the other ranks have some",
       [](CombineInput& in, CombineOutput& out, CombineOptions&) { in.weights = {}, out.weights = {}; }},
      {"unweighted where the other ranks weigh",
       [](CombineInput&, CombineOutput&, CombineOptions& options) { options.weighted = false; }},
      {"topk_weights of the wrong shape",
       [](CombineInput& in, CombineOutput&, CombineOptions&) {
         in.topk_weights = ConstTensorView(in.x.data, DType::kFloat32, {1, 1});
       }},
      {"sums over the input",
       [](CombineInput& in, CombineOutput& out, CombineOptions&) { out.x.data = const_cast<void*>(in.x.data); }},
      {"sums over half of each row of a bias",
       [](CombineInput& in, CombineOutput& out, CombineOptions&) {
         in.bias[0].data = static_cast<const std::byte*>(out.x.data) + kRowGranuleBytes;
       }},
      {"returned weights over the weights",
       [](CombineInput& in, CombineOutput& out, CombineOptions&) {
         out.weights.data = const_cast<void*>(in.weights.data);
       }},
  };
  add_view_mistakes(mistakes, "x",
                    [](CombineInput& in, CombineOutput&, CombineOptions&) -> ConstTensorView& { return in.x; });
  add_view_mistakes(mistakes, "weights",
                    [](CombineInput& in, CombineOutput&, CombineOptions&) -> ConstTensorView& { return in.weights; });
  add_view_mistakes(mistakes, "bias",
                    [](CombineInput& in, CombineOutput&, CombineOptions&) -> ConstTensorView& { return in.bias[0]; });
  add_view_mistakes(mistakes, "output x",
                    [](CombineInput&, CombineOutput& out, CombineOptions&) -> TensorView& { return out.x; });
  add_view_mistakes(mistakes, "output weights",
                    [](CombineInput&, CombineOutput& out, CombineOptions&) -> TensorView& { return out.weights; });
  const PreparedCase good = good_case(Layout::kTokens);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    for (int bad_rank : {1, kNumRanks - 1}) {
      for (const CombineMistake& mistake : mistakes) {
        CombineTensors tensors(context, group, good, 0);
        if (context.rank() == bad_rank) mistake.spoil(tensors.in, tensors.out, tensors.options);
        const Status status = group.combine(routing, tensors.in, tensors.out, stream_of(group), tensors.options);
        expect_refusal(context, finish(group, status), bad_rank, mistake.name);
        tensors.expect_untouched(context, mistake.name + ": ");
      }
      check_combine(context, group, routing, good, 0);
    }
  });
}

TEST_P(BadInputConformance, WrongRoutingStreamOrCall) {
  const PreparedCase good = good_case(Layout::kExperts);
  const PreparedCase unweighted = [this] {
    ExchangeCase spec = good_case(Layout::kTokens).spec;
    spec.world.weights = false;
    spec.combines = {{.hidden = 16}};
    return prepare(spec);
  }();
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), group_options(context));
    auto other = Group::create(context.bootstrap(), group_options(context));
    if (!context.expect_ok(group.status(), "group") || !context.expect_ok(other.status(), "other group")) return;
    const Routing routing = check_route(context, **group, good);
    const Routing of_other = check_route(context, **other, good);
    const bool bad = context.rank() == 1;
    DispatchTensors tensors(context, **group, good, 0);
    const Stream good_stream = stream_of(**group);
    const auto start_dispatch = [&](const Routing& with, Stream stream) {
      return (*group)->dispatch(with, tensors.in, tensors.out, stream, tensors.options);
    };
    const auto dispatch = [&](const Routing& with) {
      return finish(**group, start_dispatch(with, good_stream), good_stream);
    };
    expect_refusal(context, dispatch(bad ? Routing() : routing), 1, "empty Routing");
    expect_refusal(context, dispatch(bad ? of_other : routing), 1, "Routing of another group");
    if (!uses_device(**group)) {
      const Status status = start_dispatch(routing, bad ? Stream{&tensors} : Stream{});
      expect_refusal(context, finish(**group, status), 1, "a stream on a group that has none");
    }

    CombineTensors combine(context, **group, good, 0);
    const Status mixed = bad ? (*group)->combine(routing, combine.in, combine.out, good_stream, combine.options)
                             : start_dispatch(routing, good_stream);
    expect_refusal(context, finish(**group, mixed), 1, "different calls");

    tensors.out.topk_idx = TensorView(tensors.out.x.data, DType::kInt32, {routing.num_recv_rows(), 2});
    context.expect_code(dispatch(routing), ErrorCode::kInvalidArgument, "topk_idx with kExperts");
    tensors.out.topk_idx = {};
    tensors.expect_untouched(context, "after mistakes: ");

    const Routing no_weights = check_route(context, **group, unweighted);
    if (!no_weights.present()) return;
    CombineTensors sums(context, **group, unweighted, 0);
    const Status unweighable =
        (*group)->combine(no_weights, sums.in, sums.out, good_stream, CombineOptions{.weighted = true});
    context.expect_code(finish(**group, unweighable), ErrorCode::kInvalidArgument, "weighted without weights");
    sums.expect_untouched(context, "weighted without weights: ");
    check_case(context, **group, good);
    check_case(context, **other, good);
    context.expect_ok((*group)->destroy(), "destroy");
    context.expect_ok((*other)->destroy(), "destroy the other group");
    context.expect_code((*group)->route({}, {}).status(), ErrorCode::kInvalidArgument, "route after destroy");
    context.expect_code(dispatch(routing), ErrorCode::kInvalidArgument, "dispatch after destroy");
  });
}

/// A call of one rank alone: it is refused at once, without the other ranks.
TEST_P(BadInputConformance, ChannelTables) {
  const PreparedCase tokens = good_case(Layout::kTokens);
  const PreparedCase experts = good_case(Layout::kExperts);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const Routing by_token = check_route(context, group, tokens);
    const Routing by_expert = check_route(context, group, experts);
    PlainMemory memory(uses_device(group), std::vector<std::int32_t>(256, 7));
    const auto refused = [&](const Routing& routing, int num_channels, const ChannelTables& out, const char* word) {
      const Status status = group.channel_tables(routing, num_channels, out, stream_of(group));
      context.expect(
          status.code() == ErrorCode::kInvalidArgument && status.message().find(word) != std::string_view::npos,
          fmt::format("{}: {}", word, status.message()));
    };
    refused(by_expert, 4, {}, "kTokens");
    refused(Routing(), 4, {}, "empty");
    refused(by_token, 0, {}, "num_channels is 0");
    refused(by_token, kMaxChannels + 1, {}, "num_channels is 1025");
    refused(by_token, 4, {.rank_prefix = TensorView(memory.data(), DType::kInt32, {kNumRanks, 4})}, "rank_prefix");
    refused(by_token, 4, {.send_channel_prefix = TensorView(memory.data(), DType::kFloat32, {kNumRanks, 4})}, "f32");
    if (on_gpus()) {
      std::vector<std::int32_t> on_host(kNumRanks * kNumRanks);
      refused(by_token, 4, {.rank_prefix = TensorView(on_host.data(), DType::kInt32, {kNumRanks, kNumRanks})},
              "host memory");
    }
    refused(by_token, 4, {.send_index = TensorView(nullptr, DType::kInt32, {by_token.num_tokens(), kNumRanks})},
            by_token.num_tokens() > 0 ? "null" : "");
  });
}

TEST_P(BadInputConformance, IsReportedOnce) {
  const PreparedCase good = good_case(Layout::kTokens);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    DispatchTensors tensors(context, group, good, 0);
    const DispatchInput in = tensors.in;
    if (context.rank() == 1) tensors.in.x.data = nullptr;
    const Stream stream = stream_of(group);
    const Status status = group.dispatch(routing, tensors.in, tensors.out, stream, tensors.options);
    expect_refusal(context, finish(group, status), 1, "no x");
    context.expect_ok(group.wait(stream), "a second wait");
    context.expect_ok(finish(group, group.dispatch(routing, in, tensors.out, stream, tensors.options)), "a good call");
    tensors.expect_received(context, "after a refusal: ");
    context.expect_ok(group.wait(stream), "a last wait");
  });
}

/// The rank that refused a route does not use it; ranks that learn of the refusal late have already used it.
TEST_P(BadInputConformance, OthersUseARoutingThatOneRankCouldNotMake) {
  ExchangeCase spec = good_case(Layout::kTokens).spec;
  spec.world.spare_recv_rows = 1;
  const PreparedCase good = prepare(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    Routing kept;  // dropped before the next route after one round, kept after another
    for (int round = 0; round < 3; ++round) {
      check_case(context, group, good);
      const RouteArguments arguments(context, group, good);
      RouteInput in = arguments.input();
      if (context.rank() == 1) in.topk_idx.data = nullptr;
      const Stream stream = stream_of(group);
      const Result<Routing> routing = group.route(in, arguments.options(), stream);
      DispatchTensors dispatch(context, group, good, 0);
      CombineTensors combine(context, group, good, 0);
      const DispatchInput rows = dispatch.in;
      Status status = routing.status();
      if (status.ok() && round == 2 && context.rank() == 0) {
        // No rank waits for this rank's part in the refused dispatch either.
        dispatch.in.x.data = nullptr;
        context.expect_code(group.dispatch(*routing, dispatch.in, dispatch.out, stream, dispatch.options),
                            ErrorCode::kInvalidArgument, "no rows");
      }
      if (status.ok()) status = group.dispatch(*routing, rows, dispatch.out, stream, dispatch.options);
      if (status.ok()) status = group.combine(*routing, combine.in, combine.out, stream, combine.options);
      expect_refusal(context, finish(group, status), 1, "no ids");
      dispatch.expect_untouched(context, "a refused route: ");
      combine.expect_untouched(context, "a refused route: ");
      if (routing.ok() && round == 1) kept = *routing;
    }
    check_case(context, group, good);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, BadInputConformance, ::testing::ValuesIn(exchange_configs()), config_name);

}  // namespace
}  // namespace ferry::test

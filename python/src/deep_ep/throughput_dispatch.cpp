/// A new dispatch of the first generation.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "deep_ep/buffer_calls.hpp"
#include "errors.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

/// False for a value that cannot be compared: the check of num_worst_tokens refuses it on all ranks.
bool equals_zero(nb::handle value) {
  const nb::int_ zero(0);
  const int equal = PyObject_RichCompareBool(value.ptr(), zero.ptr(), Py_EQ);
  if (equal >= 0) return equal == 1;
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) nb::raise_python_error();
  PyErr_Clear();
  return false;
}

/// Five tables of a handle. A route that waits for its counts writes them, into memory with room for a likely number of
/// rows.
class PrefixTables {
 public:
  static constexpr std::size_t kNumTables = 5;
  using Made = std::array<nb::object, kNumTables>;

  PrefixTables(const Calls& calls, std::int64_t num_tokens, int num_channels, std::int64_t likely_rows)
      : calls_(calls), num_channels_(num_channels), likely_rows_(likely_rows) {
    const std::int64_t ranks = calls.group().num_ranks();
    const nb::object& i32 = calls.allocator().types().i32;
    wanted_ = {Wanted{i32, {ranks, ranks}}, Wanted{i32, {ranks, num_channels}}, Wanted{i32, {ranks, num_channels}},
               Wanted{i32, {0}, 1}, Wanted{i32, {num_tokens, ranks}}};
  }

  /// @throws nanobind::python_error
  EarlyTables make_early() {
    if (num_channels_ > kMaxChannels) return {};  // the tables are refused after the dispatch
    make(likely_rows_);
    is_written_ = true;
    return {num_channels_, views_of()};
  }

  /// After a successful route.
  const Made& fill(const Routing& routing, Stream stream) {
    const std::int64_t num_rows = routing.num_recv_rows();
    if (is_written_ && num_rows <= likely_rows_) {
      if (num_rows < likely_rows_) {
        const TensorView first{nullptr, DType::kInt32, {num_rows}};
        made_[kOfRows] = calls_.allocator().first_rows(made_[kOfRows], first);
      }
      return made_;
    }
    if (is_written_) {
      wanted_[kOfRows].shape[0] = num_rows;
      made_[kOfRows] = calls_.allocator().make(wanted_[kOfRows]);
    } else {
      make(num_rows);
    }
    const ChannelTables tables = views_of();
    const Status status = [&] {
      const CallScope scope;
      return calls_.group().channel_tables(routing, num_channels_, tables, stream);
    }();
    raise_if_error(status);
    return made_;
  }

 private:
  static constexpr std::size_t kOfRows = 3;

  void make(std::int64_t num_rows) {
    wanted_[kOfRows].shape[0] = num_rows;
    made_ = {};
    calls_.allocator().make_together(wanted_, made_);
  }

  ChannelTables views_of() const {
    std::array<TensorView, kNumTables> views;
    for (std::size_t i = 0; i < made_.size(); ++i) views[i] = read_tensor(made_[i], calls_.place());
    return {views[0], views[1], views[2], views[3], views[4]};
  }

  const Calls& calls_;
  int num_channels_;
  std::int64_t likely_rows_;
  bool is_written_ = false;
  std::array<Wanted, kNumTables> wanted_;
  Made made_;
};

/// Makes the tensors that a new dispatch needs while route waits. A failure is left to the later attempt, which reports
/// it. Takes the GIL.
EarlyTables make_early(PrefixTables& tables, EarlyOutputs& outputs) noexcept {
  const nb::gil_scoped_acquire held;
  EarlyTables made;
  try {
    made = tables.make_early();
    outputs.make();
  } catch (const std::exception&) {
    // The later attempt reports the failure.
  }
  return made;
}

/// Channels of a handle: half of the multiprocessors, also where the package chose their number.
int channels_of(const Checks& checks, nb::handle num_sms) {
  const std::int64_t sms = index_of(num_sms);
  if (sms < 2 || sms % 2 != 0) {
    checks.refuse("config.num_sms is " + nb::cast<std::string>(nb::str(num_sms)) +
                  ", expected an even number of at least 2");
  }
  return static_cast<int>(std::min<std::int64_t>(sms / 2, std::numeric_limits<int>::max()));
}

}  // namespace

/// A new dispatch whose arguments have been read.
struct BufferCalls::NewDispatch {
  Payload payload{};
  Choice choice{};  ///< ids absent: token_in_rank gives the destinations
  nb::handle token_in_rank{}, tokens_per_expert{};
  std::int64_t alignment = 1;
  int num_channels = 1;
  bool exact = true;
  RouteOptions route{};
  ReadDispatch call{};
};

void BufferCalls::read_route(const Checks& checks, const LayoutArguments& given, NewDispatch& to) const {
  const std::int64_t num_ranks = calls_->group().num_ranks();
  const std::int64_t num_tokens = to.payload.rows_view.extent(0);
  const std::array needed{std::pair{"num_tokens_per_rank", given.tokens_per_rank},
                          std::pair{"is_token_in_rank", given.token_in_rank},
                          std::pair{"num_tokens_per_expert", given.tokens_per_expert}};
  for (const auto& [name, tensor] : needed) {
    if (tensor.is_none()) {
      checks.refuse(std::string(name) + " is None, expected what get_dispatch_layout returned, or a handle");
    }
  }
  checks.table(given.tokens_per_rank, "num_tokens_per_rank", DType::kInt32, {num_ranks});
  checks.table(given.token_in_rank, "is_token_in_rank", DType::kUint8, {num_tokens, num_ranks}, true);
  to.route.num_experts = checks.table(given.tokens_per_expert, "num_tokens_per_expert", DType::kInt32, {"E"}).extent(0);
  if (has_several_nodes()) {
    const std::int64_t num_nodes = calls_->group().topology().num_nodes();
    checks.table_or_none(given.tokens_per_node, "num_tokens_per_rdma_rank", DType::kInt32, {num_nodes});
  }
  checks.num_experts(to.route.num_experts, std::to_string(to.route.num_experts));
  if (given.topk_idx.is_none() != given.topk_weights.is_none()) {
    checks.refuse("topk_idx and topk_weights: one of them is None, expected both or neither");
  }
  to.token_in_rank = given.token_in_rank;
  to.tokens_per_expert = given.tokens_per_expert;
  if (!given.topk_idx.is_none()) {
    to.choice = checks.choice(given.topk_idx, given.topk_weights, num_tokens, ids_);
    return;
  }
  to.route.num_experts = num_ranks;
  steps_.attr("check_mask")(given.token_in_rank, "dispatch: is_token_in_rank");
}

BufferCalls::NewDispatch BufferCalls::read_dispatch(nb::handle x, const LayoutArguments& given, nb::handle alignment,
                                                    nb::handle most_rows, nb::handle num_sms, bool exact) const {
  const Checks checks(*calls_, "dispatch");
  NewDispatch to;
  to.exact = exact;
  to.route.num_sms = bound_of(num_sms, "dispatch");
  to.payload = checks.payload(x);
  read_route(checks, given, to);
  to.alignment = checks.size(alignment, "expert_alignment");
  to.num_channels = channels_of(checks, num_sms);
  const bool has_ids = to.choice.ids.present();
  to.route.max_recv_rows = exact ? 0 : index_of(most_rows);
  if (!exact && (to.route.max_recv_rows < 1 || !has_ids)) {
    checks.refuse("num_worst_tokens is " + repr_of(most_rows) +
                  ", expected 0, or rows for all tokens that may arrive and topk_idx");
  }
  to.call.x = to.payload.rows;
  to.call.scales = to.payload.scales;
  to.call.in = {to.payload.rows_view, to.payload.scales_view, to.choice.weights};
  to.call.tables = has_ids;
  to.call.weights = has_ids;
  to.call.narrow_ids = has_narrow_ids();
  to.call.bounded = !exact;
  to.call.options.kernel.num_sms = to.route.num_sms;
  return to;
}

nb::object BufferCalls::dispatch(nb::handle problem, nb::handle x, const LayoutArguments& given, nb::handle alignment,
                                 nb::handle most_rows, nb::handle chunk_tokens, nb::handle num_sms) const {
  using enum Collective;
  const Stream stream = calls_->allocator().any_stream();
  const bool exact = equals_zero(most_rows);
  Turn turn = has_several_nodes() ? Turn(*calls_, stream, {kRailRoute, kRailDispatch, kRoute, kDispatch}, exact)
                                  : Turn(*calls_, stream, {kRoute, kDispatch}, exact);
  return turn.run(problem, [&] {
    NewDispatch to = read_dispatch(x, given, alignment, most_rows, num_sms, exact);
    to.call.options.kernel.chunk_tokens = chunk_of(chunk_tokens);
    return has_several_nodes() ? dispatch_to_nodes(turn, to) : dispatch_in_node(turn, to);
  });
}

nb::object BufferCalls::dispatch_in_node(Turn& turn, NewDispatch& to) const {
  const Calls& calls = *calls_;
  const bool has_ids = to.choice.ids.present();
  const nb::object ids_of_mask = has_ids ? nb::object() : steps_.attr("ids_of_mask")(to.token_in_rank);
  const TensorView ids = has_ids ? to.choice.ids : read_tensor(ids_of_mask, calls.place());
  const std::int64_t num_tokens = ids.extent(0);
  const std::int64_t likely_rows = std::max(last_rows_, num_tokens * calls.group().num_ranks());
  PrefixTables tables(calls, num_tokens, to.num_channels, likely_rows);
  EarlyOutputs outputs(calls, to.call, static_cast<int>(ids.extent(1)));
  const PlacedRouting placed =
      route(turn, Collective::kRoute, ids, to.route, [&] { return make_early(tables, outputs); });
  const Routing& routing = placed.routing;
  if (to.exact) last_rows_ = routing.num_recv_rows();
  const nb::object read_counts = counts_of(turn, routing, to);
  Received received = dispatch_rows(turn, routing, to.call, outputs.get(routing.num_recv_rows()));
  const PrefixTables::Made& made = tables.fill(routing, turn.stream());
  const nb::tuple handle = nb::make_tuple(made[0], made[1], made[2], made[3], to.token_in_rank, made[4]);
  return finish_dispatch(to, new_routing(placed, !to.exact), received, handle, read_counts);
}

nb::object BufferCalls::dispatch_to_nodes(Turn& turn, NewDispatch& to) const {
  const Calls& calls = *calls_;
  const Place place = calls.place();
  // A token is routed a second time, to the ranks that forward it, with the flags of its ranks as payload.
  const auto rail_inputs = nb::cast<nb::tuple>(steps_.attr("rail_inputs")(to.token_in_rank));
  const nb::object flags = rail_inputs[1];
  RouteOptions rail_options;
  rail_options.num_experts = calls.group().num_ranks();
  rail_options.num_sms = to.route.num_sms;
  const PlacedRouting rails =
      route(turn, Collective::kRailRoute, read_tensor(nb::object(rail_inputs[0]), place), rail_options);
  ReadDispatch rail_call{flags};
  rail_call.in.x = read_tensor(flags, place);
  rail_call.options.kernel.num_sms = to.route.num_sms;
  const Received forwarded =
      turn.make(Collective::kRailDispatch, [&] { return calls.dispatch(rails.routing, rail_call, turn.stream()); });
  const bool has_ids = to.choice.ids.present();
  const nb::object ids_of_mask = has_ids ? nb::object() : steps_.attr("ids_of_mask")(to.token_in_rank);
  const TensorView ids = has_ids ? to.choice.ids : read_tensor(ids_of_mask, place);
  const PlacedRouting placed = route(turn, Collective::kRoute, ids, to.route);
  const nb::object read_counts = counts_of(turn, placed.routing, to);
  // The ranks of each node that a token goes to travel beside its scales.
  const nb::object given_scales = or_none(to.payload.scales);
  const nb::object scales = steps_.attr("with_masks")(given_scales, to.token_in_rank);
  to.call.scales = scales;
  to.call.in.scales = read_tensor(scales, place);
  Received received = dispatch_rows(turn, placed.routing, to.call);
  const nb::object routing = new_routing(placed, !to.exact);
  const auto handle = nb::cast<nb::tuple>(steps_.attr("nodes_handle")(
      routing, to.token_in_rank, new_routing(rails, false), forwarded.x, received.scales, to.num_channels));
  received.scales = to.payload.has_scales ? steps_.attr("without_masks")(received.scales, given_scales) : nb::object();
  return finish_dispatch(to, routing, received, handle, read_counts);
}

nb::object BufferCalls::counts_of(Turn& turn, const Routing& routing, const NewDispatch& to) const {
  // The route counts rows. Choices differ where a token names an expert twice, and where no ids were given.
  if (!to.exact || (to.choice.ids.present() && !routing.may_repeat_experts())) return {};
  turn.add(Collective::kGather);
  const nb::object rows = steps_.attr("rows_to_gather")(to.tokens_per_expert);
  ReadDispatch call{rows};
  call.in.x = read_tensor(rows, calls_->place());
  call.options.kernel.num_sms = to.route.num_sms;
  const Received gathered =
      turn.make(Collective::kGather, [&] { return calls_->dispatch(Calls::native_of(to_all_), call, turn.stream()); });
  return steps_.attr("counts_of")(gathered.x, to.tokens_per_expert);
}

nb::object BufferCalls::finish_dispatch(const NewDispatch& to, const nb::object& routing, Received& received,
                                        const nb::tuple& handle, const nb::object& read_counts) const {
  if (to.payload.scales_have_one_dim) received.scales = received.scales.attr("squeeze")(1);
  link_handle(handle, routing, to.choice.ids.present());
  nb::list counts;
  if (read_counts.is_valid()) {
    counts = aligned_counts(nb::cast<std::vector<std::int32_t>>(read_counts()), to.alignment);
  } else if (to.exact) {
    counts = aligned_counts(Calls::native_of(routing).num_rows_per_local_expert(), to.alignment);
  }
  raise_known_errors();
  return nb::make_tuple(payload_of(received, to.payload), or_none(received.topk_idx), or_none(received.topk_weights),
                        counts, handle, new_event());
}

}  // namespace ferry::python::deep_ep

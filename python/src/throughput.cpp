#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "buffer_calls.hpp"
#include "errors.hpp"
#include "ferry/dispatch_layout.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

constexpr std::size_t kHandleSize = 6;

/// The arguments of a new dispatch that are not its payload.
struct NewRoute {
  TensorView ids{}, weights{};
  std::int64_t num_experts = 0;
  std::int64_t alignment = 1;
  std::int64_t most_rows = 0;
};

struct NewRouteArguments {
  nb::handle tokens_per_rank{}, token_in_rank{}, tokens_per_expert{}, topk_idx{}, topk_weights{}, alignment{},
      most_rows{};
};

std::optional<NewRoute> find_route(const Calls& calls, std::int64_t num_tokens, const NewRouteArguments& given) {
  if (given.topk_idx.is_none()) return std::nullopt;
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<TensorView> ids = find_table(given.topk_idx, place, DType::kInt64, {num_tokens, kAny});
  if (!ids || ids->extent(1) < 1 || ids->extent(1) > kMaxTopk) return std::nullopt;
  const std::optional<TensorView> weights =
      find_table(given.topk_weights, place, DType::kFloat32, {num_tokens, ids->extent(1)});
  const std::optional<TensorView> per_expert = find_table(given.tokens_per_expert, place, DType::kInt32, {kAny});
  if (!weights || !per_expert || !find_table(given.tokens_per_rank, place, DType::kInt32, {num_ranks}) ||
      !find_table(given.token_in_rank, place, DType::kUint8, {num_tokens, num_ranks}, true)) {
    return std::nullopt;
  }
  NewRoute route{*ids, *weights, per_expert->extent(0)};
  if (route.num_experts < 1 || route.num_experts % num_ranks != 0) return std::nullopt;
  const std::optional<std::int64_t> alignment = find_integer(given.alignment);
  const std::optional<std::int64_t> most_rows = find_integer(given.most_rows);
  if (!alignment || *alignment < 1 || !most_rows || *most_rows < 0) return std::nullopt;
  route.alignment = *alignment;
  route.most_rows = *most_rows;
  return route;
}

/// (ferry.Routing, whether it was made from the expert ids), on the storage of a handle's first tensor.
const Name& link_name() {
  static const Name name("_ferry_routing");
  return name;
}

/// The five tables of a handle that are made for it. Route writes them where it waits for its counts, in memory that
/// has room for as many rows as are likely.
class HandleTables {
 public:
  static constexpr std::size_t kNumTables = 5;
  using Made = std::array<nb::object, kNumTables>;

  HandleTables(const Calls& calls, std::int64_t num_tokens, int num_channels, std::int64_t likely_rows)
      : calls_(calls), num_channels_(num_channels), likely_rows_(likely_rows) {
    const std::int64_t ranks = calls.group().num_ranks();
    const nb::object& i32 = calls.allocator().types().i32;
    wanted_ = {Wanted{i32, {ranks, ranks}}, Wanted{i32, {ranks, num_channels}}, Wanted{i32, {ranks, num_channels}},
               Wanted{i32, {0}, 1}, Wanted{i32, {num_tokens, ranks}}};
  }

  /// @throws nanobind::python_error
  EarlyTables make_early() {
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

/// What can be done for a new dispatch while route waits. What fails here fails again, and is reported, when it is
/// needed. Takes the GIL.
EarlyTables make_early(HandleTables& tables, EarlyOutputs& outputs) noexcept {
  const nb::gil_scoped_acquire held;
  EarlyTables made;
  try {
    made = tables.make_early();
    outputs.make();
  } catch (const std::exception&) {
    // As if it had not been tried.
  }
  return made;
}

}  // namespace

std::optional<BufferCalls::FoundHandle> BufferCalls::find_handle(nb::handle handle) const {
  if (!nb::isinstance<nb::tuple>(handle) && !nb::isinstance<nb::list>(handle)) return std::nullopt;
  if (nb::len(handle) != kHandleSize) return std::nullopt;
  const std::int64_t num_ranks = calls_->group().num_ranks();
  const Place place = calls_->place();
  const nb::object first = handle[0];
  const std::optional<TensorView> source = find_table(nb::object(handle[3]), place, DType::kInt32, {kAny});
  const std::optional<TensorView> in_rank =
      find_table(nb::object(handle[4]), place, DType::kUint8, {kAny, num_ranks}, true);
  if (!find_table(first, place, DType::kInt32, {num_ranks, num_ranks}) || !source || !in_rank) return std::nullopt;
  FoundHandle found;
  found.link = find_link(first, link_name());  // (ferry.Routing, knows_topk)
  if (!found.link.is_valid() || !nb::isinstance<nb::tuple>(found.link) || nb::len(found.link) != 2) return std::nullopt;
  found.routing = find_routing(nb::object(found.link[0]), group_);
  if (found.routing == nullptr) return std::nullopt;
  found.knows_topk = nb::object(found.link[1]).is(nb::handle(Py_True));
  found.num_rows = source->extent(0);
  found.num_tokens = in_rank->extent(0);
  return found;
}

void BufferCalls::attach(nb::handle rank_prefix, nb::object routing) const {
  static const Name untyped_storage("untyped_storage");
  PyObject* const storage = PyObject_CallMethodNoArgs(rank_prefix.ptr(), untyped_storage.ptr());
  if (storage == nullptr) nb::raise_python_error();
  set_attribute(nb::steal(storage), link_name(), named_tuple(link_, nb::make_tuple(std::move(routing), true)));
}

nb::object BufferCalls::layout(nb::handle topk_idx, nb::handle num_experts, int ranks_per_node) const {
  const Calls& calls = *calls_;
  const Place place = calls.place();
  const int num_ranks = calls.group().num_ranks();
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<std::int64_t> experts = find_integer(num_experts);
  const std::optional<TensorView> ids = find_table(topk_idx, place, DType::kInt64, {kAny, kAny});
  if (!stream || !experts || *experts < 1 || *experts % num_ranks != 0 || !ids) return nb::none();
  const TableTypes& types = calls.allocator().types();
  const int num_nodes = (num_ranks + ranks_per_node - 1) / ranks_per_node;
  const std::array wanted = {Wanted{types.i32, {num_ranks}, 1}, Wanted{types.i32, {*experts}, 1},
                             Wanted{types.boolean, {ids->extent(0), num_ranks}}, Wanted{types.i32, {num_nodes}, 1}};
  const bool several = num_nodes > 1;
  std::array<nb::object, wanted.size()> made;
  calls.allocator().make_all(std::span(wanted).first(several ? wanted.size() : wanted.size() - 1), made);
  DispatchLayout out;
  out.num_tokens_per_rank = read_tensor(made[0], place);
  out.num_tokens_per_expert = read_tensor(made[1], place);
  out.is_token_in_rank = read_tensor(made[2], place);
  if (several) out.num_tokens_per_node = read_tensor(made[3], place);
  DispatchLayoutOptions options;
  options.num_experts = *experts;
  options.num_ranks = num_ranks;
  options.ranks_per_node = ranks_per_node;
  options.backend = place.on_gpu ? "cuda" : "cpu";
  options.device = place.on_gpu ? place.device : -1;
  const KnownMemory known;
  raise_if_error(dispatch_layout(*ids, options, out, *stream));
  raise_known_errors(calls);
  return nb::make_tuple(made[0], several ? made[3] : nb::none(), made[1], made[2], new_event());
}

nb::object BufferCalls::dispatch(nb::handle x, nb::handle tokens_per_rank, nb::handle token_in_rank,
                                 nb::handle tokens_per_expert, nb::handle topk_idx, nb::handle topk_weights,
                                 nb::handle alignment, nb::handle most_rows, nb::handle num_sms) const {
  const Calls& calls = *calls_;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  const std::optional<int> num_channels = find_channels(num_sms);
  const std::optional<Payload> payload = find_payload(x, calls.place());
  if (!stream || !bound || !num_channels || !payload) return nb::none();
  const std::int64_t num_tokens = payload->rows_view.extent(0);
  const std::optional<NewRoute> route =
      find_route(calls, num_tokens,
                 {tokens_per_rank, token_in_rank, tokens_per_expert, topk_idx, topk_weights, alignment, most_rows});
  if (!route) return nb::none();
  RouteOptions options;
  options.num_experts = route->num_experts;
  options.max_recv_rows = route->most_rows;
  options.num_sms = *bound;
  const bool exact = route->most_rows == 0;
  ReadDispatch call{payload->rows, payload->scales};
  call.in = {payload->rows_view, payload->scales_view, route->weights};
  call.tables = true;
  call.weights = true;
  call.bounded = !exact;
  call.options.kernel.num_sms = *bound;
  const std::int64_t likely_rows = std::max(last_rows_, num_tokens * calls.group().num_ranks());
  HandleTables tables(calls, num_tokens, *num_channels, likely_rows);
  EarlyOutputs outputs(calls, call, static_cast<int>(route->ids.extent(1)));
  Result<Routing> routed = [&] {
    const CallScope scope;
    return calls.group().route({route->ids, {}}, options, *stream, [&] { return make_early(tables, outputs); });
  }();
  const PlacedRouting placed{value_or_raise(std::move(routed)), calls.place()};
  const Routing& routing = placed.routing;
  if (exact) last_rows_ = routing.num_recv_rows();
  if (exact && routing.may_repeat_experts()) return new_routing(placed, false);
  Received received = calls.dispatch(routing, call, *stream, outputs.get(routing.num_recv_rows()));
  const HandleTables::Made& made = tables.fill(routing, *stream);
  const nb::list counts = exact ? aligned_counts(routing, route->alignment) : nb::list();
  raise_known_errors(calls);
  const nb::tuple handle = nb::make_tuple(made[0], made[1], made[2], made[3], token_in_rank, made[4]);
  attach(made[0], new_routing(placed, !exact));
  return nb::make_tuple(payload_of(received), received.topk_idx, received.topk_weights, counts, handle, new_event());
}

nb::object BufferCalls::dispatch_again(nb::handle x, nb::handle handle, nb::handle num_sms) const {
  const Calls& calls = *calls_;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  const std::optional<Payload> payload = find_payload(x, calls.place());
  if (!stream || !bound || !payload) return nb::none();
  const std::optional<FoundHandle> found = find_handle(handle);
  if (!found || payload->rows_view.extent(0) != found->num_tokens ||
      found->routing->routing.num_recv_rows() != found->num_rows) {
    return nb::none();
  }
  ReadDispatch call{payload->rows, payload->scales};
  call.in.x = payload->rows_view;
  call.in.scales = payload->scales_view;
  call.options.kernel.num_sms = *bound;
  Received received = calls.dispatch(found->routing->routing, call, *stream);
  raise_known_errors(calls);
  return nb::make_tuple(payload_of(received), nb::none(), nb::none(), nb::none(), nb::none(), new_event());
}

nb::object BufferCalls::combine(nb::handle x, nb::handle handle, nb::handle topk_weights, nb::handle bias,
                                nb::handle num_sms) const {
  const Calls& calls = *calls_;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  if (!stream || !bound) return nb::none();
  const std::optional<FoundHandle> found = find_handle(handle);
  if (!found || (!topk_weights.is_none() && !found->knows_topk)) return nb::none();
  const Routing& routing = found->routing->routing;
  if (routing.num_recv_rows() != found->num_rows || routing.num_tokens() != found->num_tokens) return nb::none();
  std::optional<ReadCombine> call = find_combine(calls, routing, x, topk_weights, bias);
  if (!call) return nb::none();
  call->options.kernel.num_sms = *bound;
  Combined combined = calls.combine(routing, *call, *stream);
  raise_known_errors(calls);
  return nb::make_tuple(combined.x, combined.weights, new_event());
}

}  // namespace ferry::python

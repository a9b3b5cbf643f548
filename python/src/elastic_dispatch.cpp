/// A new dispatch of the second generation, by token.

#include <array>
#include <cstddef>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "buffer_calls.hpp"
#include "errors.hpp"
#include "ferry/arrival_tables.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

struct ElasticRoute {
  TensorView ids{}, weights{}, stats{};
  std::int64_t num_experts = 0;
  std::int64_t num_local = 0;
  std::int64_t max_tokens = 0;
  std::int64_t alignment = 1;
};

struct ElasticRouteArguments {
  nb::handle topk_idx{}, topk_weights{}, expert_stats{}, num_experts{}, num_max_tokens{}, most_tokens{}, alignment{};
};

std::optional<ElasticRoute> find_route(const Calls& calls, std::int64_t num_tokens,
                                       const ElasticRouteArguments& given) {
  const Place place = calls.place();
  const std::int64_t num_ranks = calls.group().num_ranks();
  const std::optional<TensorView> ids = find_table(given.topk_idx, place, DType::kInt64, {num_tokens, kAny});
  if (!ids || ids->extent(1) < 1 || ids->extent(1) > kMaxTopk) return std::nullopt;
  const std::optional<std::int64_t> experts = find_integer(given.num_experts);
  const std::optional<std::int64_t> tokens = find_integer(given.num_max_tokens);
  const std::optional<std::int64_t> most = find_integer(given.most_tokens);
  const std::optional<std::int64_t> alignment = find_integer(given.alignment);
  if (!experts || *experts < 1 || *experts % num_ranks != 0 || !alignment || *alignment < 1 ||
      *alignment > kMaxCount / (*experts / num_ranks) || !tokens || *tokens < 1 || *tokens < num_tokens ||
      *tokens > kMaxCount / num_ranks || !most || (*most > 0 && *tokens > *most)) {
    return std::nullopt;
  }
  ElasticRoute route{.ids = *ids,
                     .num_experts = *experts,
                     .num_local = *experts / num_ranks,
                     .max_tokens = *tokens,
                     .alignment = *alignment};
  if (!given.topk_weights.is_none()) {
    const std::optional<TensorView> weights =
        find_table(given.topk_weights, place, DType::kFloat32, {num_tokens, ids->extent(1)});
    if (!weights) return std::nullopt;
    route.weights = *weights;
  }
  if (!given.expert_stats.is_none()) {
    const std::optional<TensorView> stats = find_table(given.expert_stats, place, DType::kInt32, {route.num_local});
    if (!stats) return std::nullopt;
    route.stats = *stats;
  }
  return route;
}

/// The tables of a handle, made where route waits for its counts, or before it if it does not wait.
class HandleTables {
 public:
  /// num_rows: those of the outputs, or as many as are likely. source: there is a table of sources, too.
  HandleTables(const Calls& calls, const ElasticRoute& route, std::int64_t num_rows, bool copy_ids, bool source)
      : calls_(calls), route_(route), copies_ids_(copy_ids), has_source_(source) {
    const TableTypes& types = calls.allocator().types();
    wanted_[kRowsThroughRank] = {types.i32, {calls.group().num_ranks()}, 1};
    wanted_[kExpertEnds] = {types.i32, {route.num_local}, 1};
    wanted_[kOrigin] = {types.i32, {num_rows, 2 + route.ids.extent(1)}};
    wanted_[kSource] = {types.i32, {num_rows, 2}};
    wanted_[kIds] = {types.i64, {route.ids.extent(0), route.ids.extent(1)}};
  }

  /// For as many rows, if their number is known by now.
  /// @throws nanobind::python_error
  void make(std::optional<std::int64_t> num_rows = {}) {
    if (num_rows) wanted_[kOrigin].shape[0] = wanted_[kSource].shape[0] = *num_rows;
    made_ = {};
    const std::span<const Wanted> wanted = wanted_;
    calls_.allocator().make_together(wanted.first(has_source_ ? kSource + 1 : kSource),
                                     std::span(made_).first(has_source_ ? kSource + 1 : kSource));
    if (copies_ids_) made_[kIds] = calls_.allocator().make(wanted_[kIds]);
    is_made_ = true;
  }
  bool is_made() const { return is_made_; }

  TensorView source() const { return read_tensor(made_[kSource], calls_.place()); }

  /// After the dispatch.
  void fill(const Routing& routing, const Received& received, Stream stream) {
    const Place place = calls_.place();
    const std::int64_t num_rows = routing.num_recv_rows();
    if (wanted_[kOrigin].shape[0] < num_rows) {
      wanted_[kOrigin].shape[0] = num_rows;
      made_[kOrigin] = calls_.allocator().make(wanted_[kOrigin]);
    }
    const bool has_more = wanted_[kOrigin].shape[0] > num_rows;
    TensorView origin = read_tensor(made_[kOrigin], place);
    origin.shape[0] = num_rows;
    Arrivals in;
    in.source = has_source_ ? ConstTensorView(source()) : routing.source();
    in.topk_idx = read_tensor(received.topk_idx, place);
    in.rows_per_expert = routing.num_rows_per_local_expert_view();
    in.sent_idx = route_.ids;
    ArrivalTables out;
    out.origin = origin;
    out.rows_through_rank = read_tensor(made_[kRowsThroughRank], place);
    out.expert_ends = read_tensor(made_[kExpertEnds], place);
    if (made_[kIds].is_valid()) out.sent_idx = read_tensor(made_[kIds], place);
    ArrivalTablesOptions options;
    options.num_ranks = calls_.group().num_ranks();
    options.max_tokens = route_.max_tokens;
    options.expert_alignment = route_.alignment;
    options.backend = place.on_gpu ? "cuda" : "cpu";
    options.device = place.on_gpu ? place.device : -1;
    const KnownMemory known;
    raise_if_error(arrival_tables(in, options, out, stream));
    if (has_more) made_[kOrigin] = calls_.allocator().first_rows(made_[kOrigin], origin);
  }

  const nb::object& origin() const { return made_[kOrigin]; }
  const nb::object& rows_through_rank() const { return made_[kRowsThroughRank]; }
  const nb::object& expert_ends() const { return made_[kExpertEnds]; }
  /// Not valid if no copy was wanted.
  const nb::object& ids() const { return made_[kIds]; }

 private:
  enum : std::size_t { kRowsThroughRank, kExpertEnds, kOrigin, kSource, kIds, kNumTables };

  const Calls& calls_;
  const ElasticRoute& route_;
  bool copies_ids_;
  bool has_source_;
  bool is_made_ = false;
  std::array<Wanted, kNumTables> wanted_;
  std::array<nb::object, kNumTables> made_;
};

/// What can be done for a dispatch while route waits. What fails here fails again, and is reported, when it is needed.
/// Takes the GIL.
EarlyTables make_early(HandleTables& tables, EarlyOutputs& outputs) noexcept {
  const nb::gil_scoped_acquire held;
  try {
    outputs.make();
    tables.make();
  } catch (const std::exception&) {
    // As if it had not been tried.
  }
  return {};
}

}  // namespace

nb::object BufferCalls::elastic_dispatch(nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
                                         nb::handle expert_stats, nb::handle num_experts, nb::handle num_max_tokens,
                                         nb::handle most_tokens, nb::handle alignment, const ElasticForm& form,
                                         nb::handle num_sms) const {
  const Calls& calls = *calls_;
  const std::optional<Stream> stream = calls.allocator().stream();
  const std::optional<int> bound = find_bound(num_sms);
  const std::optional<Payload> payload = find_payload(x, calls.place());
  if (!stream || !bound || !payload) return nb::none();
  const std::optional<ElasticRoute> route =
      find_route(calls, payload->rows_view.extent(0),
                 {topk_idx, topk_weights, expert_stats, num_experts, num_max_tokens, most_tokens, alignment});
  if (!route) return nb::none();
  RouteOptions options;
  options.num_experts = route->num_experts;
  options.counters.received = route->stats;
  options.num_sms = *bound;
  if (!form.exact) {
    options.max_tokens = route->max_tokens;
    options.max_recv_rows = route->max_tokens * calls.group().num_ranks();
  }
  ReadDispatch call{payload->rows, payload->scales};
  call.in = {payload->rows_view, payload->scales_view, route->weights};
  call.tables = true;
  call.weights = route->weights.present();
  call.bounded = !form.exact;
  call.column_major_scales = form.column_major_scales;
  call.options.zero_padding = form.zero_padding;
  call.options.kernel.num_sms = *bound;
  EarlyOutputs outputs(calls, call, static_cast<int>(route->ids.extent(1)));
  const std::int64_t num_rows = form.exact ? route->ids.extent(0) * calls.group().num_ranks() : options.max_recv_rows;
  // An exact route's own table of sources has no other rows than those that come.
  HandleTables tables(calls, *route, num_rows, form.copy_ids, !form.exact);
  Result<Routing> routed = [&] {
    const CallScope scope;
    return calls.group().route({route->ids, {}}, options, *stream, [&] { return make_early(tables, outputs); });
  }();
  const PlacedRouting placed{value_or_raise(std::move(routed)), calls.place()};
  const Routing& routing = placed.routing;
  try {
    if (!tables.is_made()) tables.make(routing.num_recv_rows());
    if (call.bounded) call.out.source = tables.source();
  } catch (...) {
    calls.refuse_dispatch(routing, *stream);
    throw;
  }
  Received received = calls.dispatch(routing, call, *stream, outputs.get(routing.num_recv_rows()));
  tables.fill(routing, received, *stream);
  const nb::object slots =
      tensor_on(routing.slots(), calls.place(), std::make_shared<Routing>(routing), calls.allocator().tensor_type());
  raise_known_errors(calls);

  nb::object handle = bare_object(elastic_handle_);
  static const std::array names{Name("do_expand"),
                                Name("num_experts"),
                                Name("expert_alignment"),
                                Name("num_max_tokens_per_rank"),
                                Name("num_sms"),
                                Name("topk_idx"),
                                Name("num_recv_tokens"),
                                Name("num_expanded_tokens"),
                                Name("num_recv_tokens_per_expert_list"),
                                Name("psum_num_recv_tokens_per_scaleup_rank"),
                                Name("psum_num_recv_tokens_per_expert"),
                                Name("num_unaligned_recv_tokens_per_expert"),
                                Name("recv_src_metadata"),
                                Name("dst_buffer_slot_idx"),
                                Name("_routing"),
                                Name("_last_equal")};
  const std::array<nb::object, names.size()> values{nb::bool_(false),
                                                    nb::borrow(num_experts),
                                                    nb::borrow(alignment),
                                                    nb::borrow(num_max_tokens),
                                                    nb::borrow(num_sms),
                                                    tables.ids().is_valid() ? tables.ids() : nb::borrow(topk_idx),
                                                    nb::int_(routing.num_recv_rows()),
                                                    nb::int_(0),
                                                    form.exact ? aligned_counts(routing, route->alignment) : nb::list(),
                                                    tables.rows_through_rank(),
                                                    tables.expert_ends(),
                                                    nb::none(),
                                                    tables.origin(),
                                                    slots,
                                                    new_routing(placed, !form.exact),
                                                    nb::none()};
  for (std::size_t i = 0; i < names.size(); ++i) set_attribute(handle, names[i], values[i]);
  const nb::object weights = received.topk_weights.is_valid() ? received.topk_weights : nb::none();
  return nb::make_tuple(payload_of(received), received.topk_idx, weights, handle, new_event());
}

}  // namespace ferry::python

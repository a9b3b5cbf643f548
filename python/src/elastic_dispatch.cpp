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

/// The tables of a handle. Those whose sizes do not depend on what arrives are allocated where route waits for its
/// counts.
class HandleTables {
 public:
  HandleTables(const Calls& calls, const ElasticRoute& route, bool copy_ids) : calls_(calls), route_(route) {
    const TableTypes& types = calls.allocator().types();
    wanted_ = {Wanted{types.i32, {calls.group().num_ranks()}, 1}, Wanted{types.i32, {route.num_local}, 1},
               Wanted{types.i64, {route.ids.extent(0), route.ids.extent(1)}}};
    num_wanted_ = copy_ids ? wanted_.size() : wanted_.size() - 1;
  }

  /// What fails here fails again, and is reported, in `fill`. Takes the GIL.
  EarlyTables make_early() noexcept {
    const nb::gil_scoped_acquire held;
    try {
      make();
    } catch (const std::exception&) {
      made_ = {};
    }
    return {};
  }

  /// After the dispatch.
  void fill(const Routing& routing, const Received& received, Stream stream) {
    if (!made_[0].is_valid()) make();
    const Place place = calls_.place();
    const std::int64_t num_topk = route_.ids.extent(1);
    origin_ = calls_.allocator().make({calls_.allocator().types().i32, {routing.num_recv_rows(), 2 + num_topk}});
    Arrivals in;
    in.source = received.source.is_valid() ? ConstTensorView(read_tensor(received.source, place)) : routing.source();
    in.topk_idx = read_tensor(received.topk_idx, place);
    in.rows_per_expert = routing.num_rows_per_local_expert_view();
    in.sent_idx = route_.ids;
    ArrivalTables out;
    out.origin = read_tensor(origin_, place);
    out.rows_through_rank = read_tensor(made_[0], place);
    out.expert_ends = read_tensor(made_[1], place);
    if (made_[2].is_valid()) out.sent_idx = read_tensor(made_[2], place);
    ArrivalTablesOptions options;
    options.num_ranks = calls_.group().num_ranks();
    options.max_tokens = route_.max_tokens;
    options.expert_alignment = route_.alignment;
    options.backend = place.on_gpu ? "cuda" : "cpu";
    options.device = place.on_gpu ? place.device : -1;
    raise_if_error(arrival_tables(in, options, out, stream));
  }

  const nb::object& origin() const { return origin_; }
  const nb::object& rows_through_rank() const { return made_[0]; }
  const nb::object& expert_ends() const { return made_[1]; }
  /// Not valid if no copy was wanted.
  const nb::object& ids() const { return made_[2]; }

 private:
  static constexpr std::size_t kNumEarly = 3;

  void make() { calls_.allocator().make_all(std::span(wanted_).first(num_wanted_), made_); }

  const Calls& calls_;
  const ElasticRoute& route_;
  std::array<Wanted, kNumEarly> wanted_;
  std::size_t num_wanted_;
  std::array<nb::object, kNumEarly> made_;
  nb::object origin_;
};

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
  if (!form.exact) {
    options.max_tokens = route->max_tokens;
    options.max_recv_rows = route->max_tokens * calls.group().num_ranks();
  }
  HandleTables tables(calls, *route, form.copy_ids);
  Result<Routing> routed = [&] {
    const nb::gil_scoped_release released;
    return calls.group().route({route->ids, {}}, options, *stream, [&tables] { return tables.make_early(); });
  }();
  const PlacedRouting placed{value_or_raise(std::move(routed)), calls.place()};
  const Routing& routing = placed.routing;
  ReadDispatch call{payload->rows, payload->scales};
  call.in = {payload->rows_view, payload->scales_view, route->weights};
  call.tables = true;
  call.weights = route->weights.present();
  call.bounded = !form.exact;
  call.source = !form.exact;  // an exact route's own table has no other rows
  call.column_major_scales = form.column_major_scales;
  call.options.zero_padding = form.zero_padding;
  call.options.kernel.num_sms = *bound;
  Received received = calls.dispatch(routing, call, *stream);
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

#include "expansion.hpp"

#include <array>
#include <limits>
#include <span>
#include <utility>

#include "errors.hpp"
#include "handle_tables.hpp"
#include "objects.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

/// Columns of a handle's metadata before the slots.
constexpr std::int64_t kFirstSlot = 2;

ExpansionOptions options_on(Place place) {
  ExpansionOptions options;
  options.backend = place.on_gpu ? "cuda" : "cpu";
  options.device = place.on_gpu ? place.device : -1;
  return options;
}

/// Tensors that a call needs at once, made together.
class Outputs {
 public:
  explicit Outputs(const Calls& calls) : calls_(calls) {}

  void want(const Wanted& wanted, nb::object& tensor, TensorView& view) {
    wanted_[count_] = wanted;
    places_[count_++] = {&tensor, &view};
  }
  /// @throws nanobind::python_error
  void make() {
    std::array<nb::object, kMost> made;
    calls_.allocator().make_all(std::span(wanted_).first(count_), made);
    for (std::size_t i = 0; i < count_; ++i) {
      *places_[i].first = std::move(made[i]);
      *places_[i].second = read_tensor(*places_[i].first, calls_.place());
    }
  }

 private:
  static constexpr std::size_t kMost = 4;

  const Calls& calls_;
  std::array<Wanted, kMost> wanted_{};
  std::array<std::pair<nb::object*, TensorView*>, kMost> places_{};
  std::size_t count_ = 0;
};

nb::object or_none(nb::object value) { return value.is_valid() ? std::move(value) : nb::none(); }

/// -> recv_src_metadata, rows through each rank, ends of experts, rows of each expert and the last equal choices; the
/// last two None unless expanded
nb::tuple describe_arrivals(const Calls& calls, nb::handle topk_idx, nb::handle source, nb::handle rows_per_expert,
                            std::int64_t max_tokens, std::int64_t alignment, bool expands) {
  const Place place = calls.place();
  const Arrivals in{.source = view_of(source, place),
                    .topk_idx = view_of(topk_idx, place),
                    .rows_per_expert = view_of(rows_per_expert, place)};
  HandleTables tables(calls,
                      {.num_rows = in.topk_idx.extent(0),
                       .num_topk = in.topk_idx.extent(1),
                       .num_local = in.rows_per_expert.extent(0),
                       .max_tokens = max_tokens,
                       .alignment = alignment,
                       .expands = expands},
                      {}, false);
  tables.make();
  tables.fill(in, calls.allocator().any_stream());
  return nb::make_tuple(tables.origin(), tables.rows_through_rank(), tables.expert_ends(),
                        or_none(tables.rows_of_expert()), or_none(tables.last_equal()));
}

nb::tuple expand_received(const Calls& calls, nb::object x, nb::object scales, nb::object weights, nb::handle metadata,
                          nb::handle last_equal, std::int64_t num_rows, bool zero_padding, bool column_major_scales) {
  Received by_token{std::move(x), {}, {}, {}};
  if (!scales.is_none()) by_token.scales = std::move(scales);
  if (!weights.is_none()) by_token.topk_weights = std::move(weights);
  Received made =
      expand(calls, by_token, slots_of(view_of(metadata, calls.place()), view_of(last_equal, calls.place())),
             {num_rows, zero_padding, column_major_scales}, calls.allocator().any_stream());
  return nb::make_tuple(made.x, or_none(made.scales), or_none(made.topk_weights));
}

nb::tuple reduce_sent(const Calls& calls, nb::handle x, nb::handle weights, nb::handle metadata, nb::handle last_equal,
                      bool exact) {
  const Place place = calls.place();
  const SlotViews slots = slots_of(view_of(metadata, place), view_of(last_equal, place));
  Reduced made = reduce(calls,
                        {.slots = slots.slots,
                         .x = view_of(x, place),
                         .weights = view_of(weights, place),
                         .last_equal = slots.last_equal},
                        exact, calls.allocator().any_stream());
  return nb::make_tuple(made.x, or_none(made.weights));
}

}  // namespace

SlotViews slots_of(const TensorView& metadata, const TensorView& last_equal) {
  SlotViews views;
  views.slots = metadata;
  if (metadata.data != nullptr) {
    views.slots.data = static_cast<const std::int32_t*>(metadata.data) + kFirstSlot * metadata.stride(1);
  }
  views.slots.shape[1] -= kFirstSlot;
  views.last_equal = last_equal;
  return views;
}

bool names_row_past(const ConstTensorView& slots, std::int64_t num_rows) {
  const auto* row = static_cast<const std::int32_t*>(slots.data);
  std::int32_t largest = -1;
  for (std::int64_t i = 0; i < slots.extent(0); ++i, row += slots.stride(0)) {
    for (std::int64_t k = 0; k < slots.extent(1); ++k) largest = row[k] > largest ? row[k] : largest;
  }
  return largest >= num_rows;
}

Received expand(const Calls& calls, const Received& by_token, const SlotViews& slots, const ExpandedForm& form,
                Stream stream) {
  const Place place = calls.place();
  const TableTypes& types = calls.allocator().types();
  ExpandInput in{.slots = slots.slots, .x = read_tensor(by_token.x, place), .last_equal = slots.last_equal};
  Received made;
  ExpandOutput out;
  nb::object row_of_slot;
  // The dtypes of the payload are new references, which live until the tensors are made.
  std::array<nb::object, 2> dtypes;
  Outputs outputs(calls);
  dtypes[0] = dtype_of(by_token.x);
  outputs.want({dtypes[0], {form.num_rows, in.x.extent(1)}}, made.x, out.x);
  if (by_token.scales.is_valid()) {
    in.scales = read_tensor(by_token.scales, place);
    dtypes[1] = dtype_of(by_token.scales);
    if (form.column_major_scales) {
      made.scales = calls.allocator().make_column_major(dtypes[1], form.num_rows, in.scales.extent(1));
      out.scales = read_tensor(made.scales, place);
    } else {
      outputs.want({dtypes[1], {form.num_rows, in.scales.extent(1)}}, made.scales, out.scales);
    }
  }
  if (by_token.topk_weights.is_valid()) {
    in.weights = read_tensor(by_token.topk_weights, place);
    outputs.want({types.f32, {form.num_rows}, 1}, made.topk_weights, out.weights);
  }
  if (form.zero_padding) outputs.want({types.i32, {form.num_rows}, 1}, row_of_slot, out.row_of_slot);
  outputs.make();
  ExpansionOptions options = options_on(place);
  options.zero_padding = form.zero_padding;
  const Status status = [&] {
    const CallScope scope;
    return expand_rows(in, options, out, stream);
  }();
  raise_if_error(status);
  return made;
}

Reduced reduce(const Calls& calls, const ReduceInput& in, bool exact, Stream stream) {
  const TableTypes& types = calls.allocator().types();
  const std::int64_t num_rows = in.slots.extent(0);
  Reduced made;
  // Where peers can read it, combine need not copy it first.
  const std::array rows{Wanted{exact ? types.f32 : types.bf16, {num_rows, in.x.extent(1)}, 2, true}};
  made.x = std::move(calls.allocator().make_outputs(rows).front());
  made.x_view = read_tensor(made.x, calls.place());
  ReduceOutput out{.x = made.x_view};
  if (in.weights.present()) {
    made.weights = calls.allocator().make({types.f32, {num_rows, in.slots.extent(1)}});
    made.weights_view = read_tensor(made.weights, calls.place());
    out.weights = made.weights_view;
  }
  const Status status = [&] {
    const CallScope scope;
    return reduce_rows(in, options_on(calls.place()), out, stream);
  }();
  raise_if_error(status);
  return made;
}

void define_expansion(nb::module_& module) {
  module.def("describe_arrivals", &describe_arrivals, "calls"_a, "topk_idx"_a, "source"_a, "rows_per_expert"_a,
             "max_tokens"_a, "alignment"_a, "expands"_a);
  module.def("expand_received", &expand_received, "calls"_a, "x"_a, "scales"_a.none(), "weights"_a.none(), "metadata"_a,
             "last_equal"_a.none(), "num_rows"_a, "zero_padding"_a, "column_major_scales"_a);
  module.def("reduce_sent", &reduce_sent, "calls"_a, "x"_a, "weights"_a.none(), "metadata"_a, "last_equal"_a.none(),
             "exact"_a);
}

}  // namespace ferry::python

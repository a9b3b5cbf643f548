#include "deep_ep/handle_tables.hpp"

#include <span>
#include <utility>

#include "errors.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {

HandleTables::HandleTables(const Calls& calls, const HandleShape& shape, const ConstTensorView& sent_ids,
                           bool makes_source)
    : calls_(calls), shape_(shape), sent_ids_(sent_ids) {
  const TableTypes& types = calls.allocator().types();
  wanted_[kRowsThroughRank] = {types.i32, {calls.group().num_ranks()}, 1};
  wanted_[kExpertEnds] = {types.i32, {shape.num_local}, 1};
  wanted_[kRowsOfExpert] = {types.i32, {shape.num_local}, 1};
  wanted_[kOrigin] = {types.i32, {shape.num_rows, 2 + shape.num_topk}};
  wanted_[kSource] = {types.i32, {shape.num_rows, 2}};
  if (sent_ids.present()) wanted_[kIds] = {types.i64, {sent_ids.extent(0), sent_ids.extent(1)}};
  wanted_[kLastEqual] = {types.i8, {shape.num_rows, shape.num_topk}};
  is_wanted_ = {true, true, shape.expands, true, makes_source, sent_ids.present(), shape.expands};
}

void HandleTables::make(std::optional<std::int64_t> num_rows) {
  if (num_rows) {
    for (const std::size_t table : {kOrigin, kSource, kLastEqual}) wanted_[table].shape[0] = *num_rows;
  }
  std::array<Wanted, kNumTogether> together;
  std::array<nb::object, kNumTogether> made;
  std::size_t count = 0;
  for (std::size_t table = 0; table < kNumTogether; ++table) {
    if (is_wanted_[table]) together[count++] = wanted_[table];
  }
  calls_.allocator().make_together(std::span(together).first(count), std::span(made).first(count));
  made_ = {};
  for (std::size_t table = kNumTogether; table-- > 0;) {
    if (is_wanted_[table]) made_[table] = std::move(made[--count]);
  }
  for (std::size_t table = kNumTogether; table < kNumTables; ++table) {
    if (is_wanted_[table]) made_[table] = calls_.allocator().make(wanted_[table]);
  }
  is_made_ = true;
}

TensorView HandleTables::view(std::size_t table) const {
  return made_[table].is_valid() ? read_tensor(made_[table], calls_.place()) : TensorView();
}

void HandleTables::keep_rows(std::size_t table, std::int64_t num_rows) {
  if (!is_wanted_[table] || wanted_[table].shape[0] == num_rows) return;
  if (wanted_[table].shape[0] < num_rows) {
    wanted_[table].shape[0] = num_rows;
    made_[table] = calls_.allocator().make(wanted_[table]);
    return;
  }
  TensorView first = view(table);
  first.shape[0] = num_rows;
  made_[table] = calls_.allocator().first_rows(made_[table], first);
}

void HandleTables::fill(Arrivals in, Stream stream) {
  const Place place = calls_.place();
  const std::int64_t num_rows = in.topk_idx.extent(0);
  keep_rows(kOrigin, num_rows);
  keep_rows(kLastEqual, num_rows);
  in.sent_idx = sent_ids_;
  const ArrivalTables out{.origin = view(kOrigin),
                          .rows_through_rank = view(kRowsThroughRank),
                          .expert_ends = view(kExpertEnds),
                          .sent_idx = view(kIds),
                          .rows_of_expert = view(kRowsOfExpert),
                          .last_equal = view(kLastEqual)};
  ArrivalTablesOptions options;
  options.num_ranks = calls_.group().num_ranks();
  options.max_tokens = shape_.max_tokens;
  options.expert_alignment = shape_.alignment;
  options.expand = shape_.expands;
  options.backend = place.on_gpu ? "cuda" : "cpu";
  options.device = place.on_gpu ? place.device : -1;
  const Status status = [&] {
    const CallScope scope;
    return arrival_tables(in, options, out, stream);
  }();
  raise_if_error(status);
}

}  // namespace ferry::python::deep_ep

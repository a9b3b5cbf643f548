#include "buffer_calls.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "objects.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

/// Most memory of rows that is taken before it is known how many come.
constexpr std::int64_t kMostEarlyBytes = std::int64_t{16} << 20;
/// One part of so many may stay unused.
constexpr std::int64_t kMostUnusedShare = 4;

}  // namespace

void EarlyOutputs::make() {
  const ConstTensorView& x = call_.in.x;
  const std::int64_t num_rows = x.extent(0) * std::min(calls_.group().num_ranks(), num_topk_);
  const std::int64_t row_bytes = x.extent(1) * static_cast<std::int64_t>(size_bytes(x.dtype));
  if (num_rows == 0 || num_rows > kMostEarlyBytes / row_bytes || call_.column_major_scales) return;
  outputs_ = calls_.make_outputs({Layout::kTokens, num_rows, num_topk_}, call_, true);
}

MadeOutputs* EarlyOutputs::get(std::int64_t num_rows) {
  if (!outputs_) return nullptr;
  // Whoever keeps what comes keeps all that was made.
  const std::int64_t num_made = outputs_->out.x.extent(0);
  return num_rows <= num_made && num_made - num_rows <= num_made / kMostUnusedShare ? &*outputs_ : nullptr;
}

nb::list aligned_counts(const Routing& routing, std::int64_t alignment) {
  const std::span<const std::int32_t> rows = routing.num_rows_per_local_expert();
  nb::list counts = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(rows.size())));
  if (!counts.is_valid()) nb::raise_python_error();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t count = alignment == 1 ? rows[i] : (rows[i] + alignment - 1) / alignment * alignment;
    PyObject* const made = PyLong_FromLongLong(count);
    if (made == nullptr) nb::raise_python_error();
    PyList_SET_ITEM(counts.ptr(), static_cast<Py_ssize_t>(i), made);  // takes it over
  }
  return counts;
}

BufferCalls::BufferCalls(nb::object calls, nb::object group, const nb::tuple& types, nb::object captured)
    : owner_(std::move(calls)),
      calls_(nb::cast<const Calls*>(owner_)),
      group_(std::move(group)),
      event_(types[0]),
      suggested_(types[1]),
      link_(types[2]),
      elastic_handle_(types[3]),
      latency_link_(types[4]),
      hook_(types[5]),
      captured_(std::move(captured)),
      in_flight_(group_.attr("_in_flight")) {}

std::optional<int> BufferCalls::find_bound(nb::handle num_sms) const {
  if (num_sms.is_none() || nb::handle(Py_TYPE(num_sms.ptr())).is(suggested_)) return 0;
  const std::optional<std::int64_t> chosen = find_integer(num_sms);
  if (!chosen || *chosen < 0 || *chosen > std::numeric_limits<int>::max()) return std::nullopt;
  return static_cast<int>(*chosen);
}

nb::object BufferCalls::bound_of(nb::handle num_sms) const {
  const std::optional<int> bound = find_bound(num_sms);
  return bound ? nb::object(nb::int_(*bound)) : nb::none();
}

std::optional<int> BufferCalls::find_channels(nb::handle num_sms) const {
  if (!PyLong_Check(num_sms.ptr())) return std::nullopt;
  int overflow = 0;
  const long long sms = PyLong_AsLongLongAndOverflow(num_sms.ptr(), &overflow);
  if (overflow != 0 || sms < 2 || sms % 2 != 0 || sms / 2 > kMaxChannels) return std::nullopt;
  return static_cast<int>(sms / 2);
}

nb::object BufferCalls::new_event() const { return bare_object(event_); }

nb::object BufferCalls::new_routing(const PlacedRouting& routing, bool bounded) const {
  return calls_->new_routing(routing, group_, false, bounded);
}

void define_buffer_calls(nb::module_& module) {
  nb::class_<BufferCalls>(module, "BufferCalls")
      .def(nb::init<nb::object, nb::object, nb::tuple, nb::object>(), "calls"_a, "group"_a, "types"_a, "captured"_a)
      .def("bound_of", &BufferCalls::bound_of, "num_sms"_a.none())
      .def("layout", &BufferCalls::layout, "topk_idx"_a.none(), "num_experts"_a.none(), "ranks_per_node"_a)
      .def("dispatch", &BufferCalls::dispatch, "x"_a.none(), "tokens_per_rank"_a.none(), "token_in_rank"_a.none(),
           "tokens_per_expert"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "alignment"_a.none(),
           "most_rows"_a.none(), "num_sms"_a.none())
      .def("dispatch_again", &BufferCalls::dispatch_again, "x"_a.none(), "handle"_a.none(), "num_sms"_a.none())
      .def("combine", &BufferCalls::combine, "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(), "bias"_a.none(),
           "num_sms"_a.none())
      .def(
          "elastic_dispatch",
          [](const BufferCalls& self, nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
             nb::handle expert_stats, nb::handle num_experts, nb::handle num_max_tokens, nb::handle most_tokens,
             nb::handle alignment, bool zero_padding, bool column_major_scales, bool copy_ids, bool exact, bool expand,
             nb::handle num_sms) {
            return self.elastic_dispatch(x, topk_idx, topk_weights, expert_stats, num_experts, num_max_tokens,
                                         most_tokens, alignment,
                                         {zero_padding, column_major_scales, copy_ids, exact, expand}, num_sms);
          },
          "x"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "expert_stats"_a.none(), "num_experts"_a.none(),
          "num_max_tokens"_a.none(), "most_tokens"_a.none(), "alignment"_a.none(), "zero_padding"_a,
          "column_major_scales"_a, "copy_ids"_a, "exact"_a, "expand"_a, "num_sms"_a.none())
      .def(
          "elastic_dispatch_again",
          [](const BufferCalls& self, nb::handle x, nb::handle handle, nb::handle topk_weights, bool zero_padding,
             bool column_major_scales, nb::handle num_sms) {
            return self.elastic_dispatch_again(x, handle, topk_weights, {zero_padding, column_major_scales}, num_sms);
          },
          "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(), "zero_padding"_a, "column_major_scales"_a,
          "num_sms"_a.none())
      .def("elastic_combine", &BufferCalls::elastic_combine, "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(),
           "bias"_a.none(), "num_sms"_a.none())
      .def(
          "low_latency_dispatch",
          [](const BufferCalls& self, nb::handle x, nb::handle topk_idx, nb::handle max_tokens, nb::handle num_experts,
             nb::handle expert_stats, nb::handle wait_stats, nb::handle sent, bool use_fp8, bool round_scale,
             bool use_ue8m0) {
            return self.low_latency_dispatch(x, topk_idx, max_tokens, num_experts, expert_stats, wait_stats, sent,
                                             {use_fp8, round_scale, use_ue8m0});
          },
          "x"_a.none(), "topk_idx"_a.none(), "max_tokens"_a.none(), "num_experts"_a.none(), "expert_stats"_a.none(),
          "wait_stats"_a.none(), "sent"_a.none(), "use_fp8"_a, "round_scale"_a, "use_ue8m0"_a)
      .def("low_latency_combine", &BufferCalls::low_latency_combine, "x"_a.none(), "topk_idx"_a.none(),
           "topk_weights"_a.none(), "handle"_a.none(), "out"_a.none(), "wait_stats"_a.none(), "sent"_a.none());
}

}  // namespace ferry::python

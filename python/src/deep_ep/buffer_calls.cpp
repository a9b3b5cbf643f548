#include "deep_ep/buffer_calls.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "arguments.hpp"
#include "errors.hpp"
#include "objects.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python::deep_ep {
namespace {

/// Most memory for rows whose number is not yet known.
constexpr std::int64_t kMostEarlyBytes = std::int64_t{16} << 20;
/// Inverse of the share of early rows that may stay unused.
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
  // The result keeps the memory of all rows that were made, used or not.
  const std::int64_t num_made = outputs_->out.x.extent(0);
  return num_rows <= num_made && num_made - num_rows <= num_made / kMostUnusedShare ? &*outputs_ : nullptr;
}

nb::list aligned_counts(std::span<const std::int32_t> rows, std::int64_t alignment) {
  nb::list counts = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(rows.size())));
  if (!counts.is_valid()) nb::raise_python_error();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t count = (rows[i] / alignment + (rows[i] % alignment != 0 ? 1 : 0)) * alignment;
    PyObject* const made = PyLong_FromLongLong(count);
    if (made == nullptr) nb::raise_python_error();
    PyList_SetItem(counts.ptr(), static_cast<Py_ssize_t>(i), made);  // takes it over
  }
  return counts;
}

BufferCalls::BufferCalls(nb::object calls, nb::object group, const nb::tuple& types, nb::object steps,
                         nb::object captured, nb::object to_all, bool narrow_ids)
    : owner_(std::move(calls)),
      calls_(nb::cast<const Calls*>(owner_)),
      group_(std::move(group)),
      types_{types[0], types[1], types[2], types[3], types[4], types[5]},
      steps_(std::move(steps)),
      captured_(std::move(captured)),
      to_all_(std::move(to_all)),
      ids_(narrow_ids ? DType::kInt32 : DType::kInt64),
      in_flight_(group_.attr("_in_flight")) {}

int BufferCalls::bound_of(nb::handle num_sms, const char* operation) const {
  if (num_sms.is_none() || nb::isinstance(num_sms, types_.suggested)) return 0;
  if (nb::isinstance(num_sms, types_.not_a_config)) {
    refuse(std::string(operation) + ": config is a " + nb::cast<std::string>(num_sms.attr("shown")) +
           ", expected a deep_ep.Config or None");
  }
  const std::int64_t number = index_of(num_sms);
  if (number < 0 || number > std::numeric_limits<int>::max()) {
    refuse(std::string(operation) + ": num_sms is " + repr_of(num_sms) +
           ", expected a number of multiprocessors, or 0 for Ferry's own choice");
  }
  return static_cast<int>(number);
}

int BufferCalls::chunk_of(nb::handle chunk_tokens) const {
  if (!has_several_nodes() || chunk_tokens.is_none() || nb::isinstance(chunk_tokens, types_.suggested)) return 0;
  const std::int64_t number = index_of(chunk_tokens);
  return static_cast<int>(std::clamp<std::int64_t>(number, 0, std::numeric_limits<int>::max()));
}

void BufferCalls::raise_known_errors() const { raise_if_error(calls_->group().poll()); }

nb::list BufferCalls::read_biases(const Checks& checks, nb::handle bias, std::int64_t num_tokens, std::int64_t hidden,
                                  CombineInput& in) const {
  nb::list biases = checks.biases(bias, num_tokens, hidden, in);
  const bool is_known = bias.is_none() || is_sequence(bias) || nb::isinstance(bias, calls_->allocator().tensor_type());
  if (!is_known) {
    for (const nb::handle tensor : biases) steps_.attr("reads")(tensor);
  }
  return biases;
}

nb::object BufferCalls::epilogue_event(nb::handle epilogue, const char* operation) const {
  if (epilogue.is_none()) return nb::none();
  return steps_.attr("event_of")(epilogue, std::string(operation) + ": previous_event_before_epilogue");
}

nb::object DeferredCall::make() {
  if (!finish_) refuse("a deferred call was finished already; its results are those of the first wait");
  const Finish finish = std::exchange(finish_, nullptr);
  return finish(calls_->allocator().any_stream());
}

nb::object BufferCalls::defer(std::initializer_list<nb::object> read, DeferredCall::Finish finish) const {
  nb::list tensors;
  for (const nb::object& tensor : read) {
    if (tensor.is_valid() && !tensor.is_none()) tensors.append(tensor);
  }
  return nb::make_tuple(DeferredCall(nb::find(*this), *calls_, std::move(finish)), nb::tuple(tensors), new_event());
}

void BufferCalls::wait_for(nb::handle event) const {
  if (!event.is_none()) steps_.attr("wait")(event);
}

nb::object BufferCalls::new_event() const { return bare_object(types_.event); }

nb::object BufferCalls::new_routing(const PlacedRouting& routing, bool bounded) const {
  return calls_->new_routing(routing, group_, false, bounded);
}

PlacedRouting BufferCalls::route(Turn& turn, Collective collective, const TensorView& ids, const RouteOptions& options,
                                 const std::function<EarlyTables()>& while_waiting) const {
  return turn.make(collective, [&]() -> PlacedRouting {
    Result<Routing> routed = [&] {
      const CallScope scope;
      return calls_->group().route({ids, {}}, options, turn.stream(), while_waiting);
    }();
    PlacedRouting placed{value_or_raise(std::move(routed)), calls_->place()};
    if (collective == Collective::kRailRoute) {
      turn.set_rail_routing(placed.routing);
    } else {
      turn.set_routing(placed.routing);
    }
    return placed;
  });
}

Received BufferCalls::dispatch_rows(Turn& turn, const Routing& routing, const ReadDispatch& call,
                                    MadeOutputs* early) const {
  return turn.make(Collective::kDispatch, [&] { return calls_->dispatch(routing, call, turn.stream(), early); });
}

Combined BufferCalls::combine_rows(Turn& turn, const Routing& routing, const ReadCombine& call) const {
  return turn.make(Collective::kCombine, [&] { return calls_->combine(routing, call, turn.stream()); });
}

void define_calls(nb::module_& module) {
  nb::class_<DeferredCall>(module, "DeferredCall").def("__call__", &DeferredCall::make);
  nb::class_<BufferCalls>(module, "BufferCalls")
      .def(nb::init<nb::object, nb::object, nb::tuple, nb::object, nb::object, nb::object, bool>(), "calls"_a,
           "group"_a, "types"_a, "steps"_a, "captured"_a, "to_all"_a, "narrow_ids"_a)
      .def(
          "bound_of",
          [](const BufferCalls& self, nb::handle num_sms, const std::string& operation) {
            return self.bound_of(num_sms, operation.c_str());
          },
          "num_sms"_a.none(), "operation"_a)
      .def("chunk_of", &BufferCalls::chunk_of, "chunk_tokens"_a.none())
      .def("layout", &BufferCalls::layout, "problem"_a.none(), "topk_idx"_a.none(), "num_experts"_a.none(),
           "ranks_per_node"_a)
      .def(
          "dispatch",
          [](const BufferCalls& self, nb::handle problem, nb::handle x, nb::handle tokens_per_rank,
             nb::handle tokens_per_node, nb::handle token_in_rank, nb::handle tokens_per_expert, nb::handle topk_idx,
             nb::handle topk_weights, nb::handle alignment, nb::handle most_rows, nb::handle chunk_tokens,
             nb::handle num_sms) {
            return self.dispatch(
                problem, x,
                {tokens_per_rank, tokens_per_node, token_in_rank, tokens_per_expert, topk_idx, topk_weights}, alignment,
                most_rows, chunk_tokens, num_sms);
          },
          "problem"_a.none(), "x"_a.none(), "tokens_per_rank"_a.none(), "tokens_per_node"_a.none(),
          "token_in_rank"_a.none(), "tokens_per_expert"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(),
          "alignment"_a.none(), "most_rows"_a.none(), "chunk_tokens"_a.none(), "num_sms"_a.none())
      .def("dispatch_again", &BufferCalls::dispatch_again, "problem"_a.none(), "x"_a.none(), "handle"_a.none(),
           "topk_idx"_a.none(), "topk_weights"_a.none(), "chunk_tokens"_a.none(), "num_sms"_a.none())
      .def("combine", &BufferCalls::combine, "problem"_a.none(), "x"_a.none(), "handle"_a.none(),
           "topk_weights"_a.none(), "bias"_a.none(), "chunk_tokens"_a.none(), "num_sms"_a.none())
      .def(
          "elastic_dispatch",
          [](const BufferCalls& self, nb::handle problem, nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
             nb::handle expert_stats, nb::handle num_experts, nb::handle num_max_tokens, nb::handle most_tokens,
             nb::handle alignment, bool zero_padding, bool column_major_scales, bool copy_ids, bool exact, bool expand,
             bool deferred, nb::handle epilogue, nb::handle num_sms) {
            return self.elastic_dispatch(
                problem, x, {topk_idx, topk_weights, expert_stats, num_experts, num_max_tokens, most_tokens, alignment},
                {zero_padding, column_major_scales, copy_ids, exact, expand}, deferred, epilogue, num_sms);
          },
          "problem"_a.none(), "x"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "expert_stats"_a.none(),
          "num_experts"_a.none(), "num_max_tokens"_a.none(), "most_tokens"_a.none(), "alignment"_a.none(),
          "zero_padding"_a, "column_major_scales"_a, "copy_ids"_a, "exact"_a, "expand"_a, "deferred"_a,
          "epilogue"_a.none(), "num_sms"_a.none())
      .def(
          "elastic_dispatch_again",
          [](const BufferCalls& self, nb::handle problem, nb::handle x, nb::handle handle, nb::handle topk_weights,
             nb::handle given, bool zero_padding, bool column_major_scales, bool deferred, nb::handle epilogue,
             nb::handle num_sms) {
            return self.elastic_dispatch_again(problem, x, handle, topk_weights, given,
                                               {zero_padding, column_major_scales}, deferred, epilogue, num_sms);
          },
          "problem"_a.none(), "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(), "given"_a.none(),
          "zero_padding"_a, "column_major_scales"_a, "deferred"_a, "epilogue"_a.none(), "num_sms"_a.none())
      .def("elastic_combine", &BufferCalls::elastic_combine, "problem"_a.none(), "x"_a.none(), "handle"_a.none(),
           "topk_weights"_a.none(), "bias"_a.none(), "single_rounding"_a, "deferred"_a, "epilogue"_a.none(),
           "num_sms"_a.none())
      .def(
          "low_latency_dispatch",
          [](const BufferCalls& self, nb::handle problem, nb::handle x, nb::handle topk_idx, nb::handle max_tokens,
             nb::handle num_experts, nb::handle expert_stats, nb::handle wait_stats, nb::handle hook, bool use_fp8,
             bool round_scale, bool use_ue8m0) {
            return self.low_latency_dispatch(problem, x, topk_idx, max_tokens, num_experts, expert_stats, wait_stats,
                                             hook, {use_fp8, round_scale, use_ue8m0});
          },
          "problem"_a.none(), "x"_a.none(), "topk_idx"_a.none(), "max_tokens"_a.none(), "num_experts"_a.none(),
          "expert_stats"_a.none(), "wait_stats"_a.none(), "hook"_a.none(), "use_fp8"_a, "round_scale"_a, "use_ue8m0"_a)
      .def("low_latency_combine", &BufferCalls::low_latency_combine, "problem"_a.none(), "x"_a.none(),
           "topk_idx"_a.none(), "topk_weights"_a.none(), "handle"_a.none(), "out"_a.none(), "wait_stats"_a.none(),
           "zero_copy"_a, "hook"_a.none(), "overlap"_a.none())
      .def("received_on", &BufferCalls::received_on, "stream"_a)
      .def(
          "check_latency_shape",
          [](const BufferCalls& self, nb::handle max_tokens, nb::handle hidden, nb::handle num_experts,
             const std::string& operation) {
            self.check_latency_shape(max_tokens, hidden, num_experts, operation.c_str());
          },
          "max_tokens"_a.none(), "hidden"_a.none(), "num_experts"_a.none(), "operation"_a)
      .def(
          "slab_of",
          [](const BufferCalls& self, nb::handle handle, const std::string& operation) {
            return self.slab_of(handle, operation.c_str());
          },
          "handle"_a.none(), "operation"_a);
}

}  // namespace ferry::python::deep_ep

#include "buffer_calls.hpp"

#include <limits>
#include <utility>

#include "objects.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {

BufferCalls::BufferCalls(nb::object calls, nb::object group, const nb::tuple& types)
    : owner_(std::move(calls)),
      calls_(nb::cast<const Calls*>(owner_)),
      group_(std::move(group)),
      event_(types[0]),
      suggested_(types[1]),
      link_(types[2]),
      elastic_handle_(types[3]) {}

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
      .def(nb::init<nb::object, nb::object, nb::tuple>(), "calls"_a, "group"_a, "types"_a)
      .def("bound_of", &BufferCalls::bound_of, "num_sms"_a.none())
      .def("layout", &BufferCalls::layout, "topk_idx"_a.none(), "num_experts"_a.none(), "ranks_per_node"_a)
      .def("dispatch", &BufferCalls::dispatch, "x"_a.none(), "tokens_per_rank"_a.none(), "token_in_rank"_a.none(),
           "tokens_per_expert"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(), "alignment"_a.none(),
           "most_rows"_a.none(), "num_sms"_a.none())
      .def("dispatch_again", &BufferCalls::dispatch_again, "x"_a.none(), "handle"_a.none(), "num_sms"_a.none())
      .def("combine", &BufferCalls::combine, "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(), "bias"_a.none(),
           "num_sms"_a.none())
      .def("elastic_dispatch_again", &BufferCalls::elastic_dispatch_again, "x"_a.none(), "handle"_a.none(),
           "topk_weights"_a.none(), "zero_padding"_a.none(), "num_sms"_a.none())
      .def("elastic_combine", &BufferCalls::elastic_combine, "x"_a.none(), "handle"_a.none(), "topk_weights"_a.none(),
           "bias"_a.none(), "num_sms"_a.none());
}

}  // namespace ferry::python

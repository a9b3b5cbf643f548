/// ferry._native: the C++ interface for Python, without torch. The package `ferry` wraps it for torch tensors.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arguments.hpp"
#include "balance.hpp"
#include "bootstrap.hpp"
#include "calls.hpp"
#include "deep_ep/buffer_calls.hpp"
#include "errors.hpp"
#include "ferry/backends.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/fp8.hpp"
#include "ferry/group.hpp"
#include "ferry/int8.hpp"
#include "ferry/version.hpp"
#include "gating.hpp"
#include "gil.hpp"
#include "latency.hpp"
#include "membership.hpp"
#include "placed.hpp"
#include "symmetric_pool.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferry::python {
namespace {

Stream stream_of(std::uintptr_t handle) { return {reinterpret_cast<void*>(handle)}; }

/// A Group whose calls raise and release the GIL while they wait.
class PyGroup {
 public:
  PyGroup(std::shared_ptr<Group> group, int device, std::shared_ptr<const SignalCheck> signals)
      : group_(std::move(group)), signals_(std::move(signals)) {
    place_ = {group_->backend() == "cuda", group_->backend() == "cuda" ? device : 0};
    pool_ = std::make_shared<SymmetricPool>(group_);
  }

  static std::shared_ptr<PyGroup> create(std::shared_ptr<Bootstrap> bootstrap, const std::string& backend, int device,
                                         std::int64_t timeout_ns, std::size_t arena_bytes, int ranks_per_node,
                                         const std::string& transport, const std::string& ring_memory,
                                         const std::string& net_devices, const std::string& tuning_file,
                                         std::size_t latency_bytes, bool mask_lost_ranks, std::int64_t mask_timeout_ns,
                                         int num_reserved_sms, std::int64_t network_poll_ns, int network_service_level,
                                         int network_paths, int num_ranks, std::vector<int> present_ranks,
                                         bool verify) {
    GroupOptions options;
    options.backend = backend;
    options.timeout_ns = timeout_ns;
    options.arena_bytes = arena_bytes;
    options.ranks_per_node = ranks_per_node;
    options.transport = transport;
    options.ring_memory = ring_memory;
    options.net_devices = net_devices;
    options.tuning_file = tuning_file;
    options.device = device;
    options.latency_bytes = latency_bytes;
    options.mask_lost_ranks = mask_lost_ranks;
    options.mask_timeout_ns = mask_timeout_ns;
    options.num_reserved_sms = num_reserved_sms;
    options.network_poll_ns = network_poll_ns;
    options.network_service_level = network_service_level;
    options.network_paths = network_paths;
    options.num_ranks = num_ranks;
    options.present_ranks = std::move(present_ranks);
    options.verify = verify;
    const auto signals = std::make_shared<SignalCheck>();
    options.interrupted = [signals] { return signals->ask(); };
    Result<std::shared_ptr<Group>> group = [&] {
      const GilReleased released;
      return Group::create(std::move(bootstrap), options);
    }();
    return std::make_shared<PyGroup>(value_or_raise(std::move(group)), device, signals);
  }

  void refuse_in_handler(const std::string& operation) const { signals_->refuse_in_handler(operation.c_str()); }

  int rank() const { return group_->rank(); }
  int num_ranks() const { return group_->num_ranks(); }
  int ranks_per_node() const { return group_->topology().ranks_per_node; }
  std::string backend() const { return std::string(group_->backend()); }

  PlacedBuffer allocate(std::size_t num_bytes) {
    Result<Buffer> buffer = [&] {
      const GilReleased released;
      return group_->allocate(num_bytes);
    }();
    return {value_or_raise(std::move(buffer)), place_};
  }

  nb::tuple memory_usage() const {
    const MemoryUsage usage = group_->memory_usage();
    return nb::make_tuple(usage.control_bytes, usage.staging_bytes, usage.allocated_bytes);
  }

  void trim() {
    raise_if_error(without_gil([&] { return group_->trim(); }));
  }

  /// Engine; for each rail peer its rank, the bytes and messages sent, and the path to it; devices; memory of the
  /// rings; settings of the cards; why rings are in host memory.
  nb::tuple network_usage() const {
    const NetworkUsage usage = [&] {
      const GilReleased released;
      return group_->network_usage();
    }();
    nb::list rails;
    for (const RailUsage& rail : usage.rails) {
      rails.append(nb::make_tuple(rail.rank, rail.sent_bytes, rail.num_messages, rail.route));
    }
    return nb::make_tuple(usage.transport, rails, usage.net_devices, usage.ring_memory, usage.service_level,
                          usage.num_paths, usage.why_host_memory);
  }

  std::vector<std::int64_t> wait_times_ns() const { return group_->wait_times_ns(); }

  /// out: rank prefix, send and receive channel prefix, source token, send index.
  void channel_tables(const PlacedRouting& routing, int num_channels, const nb::tuple& out, std::uintptr_t stream) {
    const auto view = [&](std::size_t at) { return read_tensor(out[at], place_); };
    const ChannelTables tables{view(0), view(1), view(2), view(3), view(4)};
    raise_if_error(
        without_gil([&] { return group_->channel_tables(routing.routing, num_channels, tables, stream_of(stream)); }));
  }

  // On CPUs these three first make the split calls that are in flight.
  void latency_update_mask(nb::handle rank, bool masked, std::uintptr_t stream) {
    const int number = whole_32(rank, "latency_update_mask", "rank");
    raise_if_error(without_gil([&] { return group_->latency_update_mask(number, masked, stream_of(stream)); }));
  }
  void latency_query_mask(nb::handle out, std::uintptr_t stream) {
    const TensorView view = view_of(out, place_, "latency_query_mask", "out");
    raise_if_error(without_gil([&] { return group_->latency_query_mask(view, stream_of(stream)); }));
  }
  void latency_clear_mask(std::uintptr_t stream) {
    raise_if_error(without_gil([&] { return group_->latency_clear_mask(stream_of(stream)); }));
  }

  /// The silent ranks.
  nb::tuple suspend() {
    signals_->refuse_in_handler("suspend");
    Result<std::vector<int>> silent = [&] {
      const GilReleased released;
      return group_->suspend();
    }();
    return nb::tuple(nb::cast(value_or_raise(std::move(silent))));
  }
  void renew(std::shared_ptr<Bootstrap> bootstrap, const std::vector<int>& present_ranks) {
    raise_if_error(without_gil([&] { return group_->renew(std::move(bootstrap), present_ranks); }));
  }

  /// memory: a ferry._memory.HostMemory or DeviceMemory.
  /// classes: ferry.Routing, Received, Combined, Placement and LoadCounters.
  std::shared_ptr<Calls> calls(nb::object memory, const nb::tuple& classes) const {
    CallTypes types{classes[0], classes[1], classes[2], {classes[3], classes[4]}};
    return std::make_shared<Calls>(group_, pool_, place_, std::move(memory), std::move(types));
  }

  SymmetricPool& pool() { return *pool_; }
  void raise_pool_error() { raise_if_error(pool_->take_error()); }

  void wait(std::uintptr_t stream) {
    raise_if_error(without_gil([&] { return group_->wait(stream_of(stream)); }));
  }
  void poll() { raise_if_error(group_->poll()); }
  void destroy() {
    raise_if_error(without_gil([&] { return group_->destroy(); }));
  }

 private:
  template <typename Call>
  static Status without_gil(Call call) {
    const GilReleased released;
    return call();
  }

  std::shared_ptr<Group> group_;
  std::shared_ptr<const SignalCheck> signals_;
  std::shared_ptr<SymmetricPool> pool_;
  Place place_;
};

template <typename T>
nb::list list_of(std::span<const T> values) {
  nb::list list;
  for (const T value : values) list.append(value);
  return list;
}

/// If rows are bounded, reading the spans of counts waits for the route.
template <typename T>
nb::list waited_list(const PlacedRouting& self, std::span<const T> (Routing::*read)() const) {
  const std::span<const T> values = [&] {
    const GilReleased released;
    return (self.routing.*read)();
  }();
  return list_of(values);
}

nb::object table(const nb::handle& self, ConstTensorView (Routing::*read)() const) {
  const auto& placed = nb::cast<const PlacedRouting&>(self);
  const ConstTensorView view = [&] {
    const GilReleased released;
    return (placed.routing.*read)();
  }();
  return array_of(view, placed.place, self);
}

/// out: tokens per rank, per node, per expert, is_token_in_rank. `device`: -1 on the host.
void count_layout(nb::handle topk_idx, std::int64_t num_experts, int num_ranks, int ranks_per_node,
                  const nb::tuple& out, int device, std::uintptr_t stream) {
  const Place place{device >= 0, device >= 0 ? device : 0};
  DispatchLayoutOptions options;
  options.num_experts = num_experts;
  options.num_ranks = num_ranks;
  options.ranks_per_node = ranks_per_node;
  options.backend = place.on_gpu ? "cuda" : "cpu";
  options.device = device;
  const TensorView ids = view_of(topk_idx, place, "dispatch_layout", "topk_idx");
  const auto view = [&](std::size_t at) { return read_tensor(out[at], place); };
  raise_if_error(dispatch_layout(ids, options, {view(0), view(1), view(2), view(3)}, stream_of(stream)));
}

ExecutionOptions execution_on(Place place) { return {place.on_gpu ? "cuda" : "cpu", place.on_gpu ? place.device : -1}; }

/// `device`: -1 on the host.
void quantize_rows(nb::handle x, nb::handle q, nb::handle scales, int mode, int device, std::uintptr_t stream) {
  const Place place{device >= 0, device >= 0 ? device : 0};
  const TensorView from = view_of(x, place, "quantize", "x");
  const TensorView to = view_of(q, place, "quantize", "out");
  const TensorView to_scales = view_of(scales, place, "quantize", "out_scales");
  const auto quantization = static_cast<Quantization>(mode);
  if (quantization == Quantization::kInt8) {
    raise_if_error(quantize_int8(from, to, to_scales, execution_on(place), stream_of(stream)));
    return;
  }
  const Fp8ScaleFormat format = quantization == Quantization::kFp8             ? Fp8ScaleFormat::kFloat32
                                : quantization == Quantization::kFp8PowerOfTwo ? Fp8ScaleFormat::kPowerOfTwo
                                                                               : Fp8ScaleFormat::kUe8m0;
  raise_if_error(quantize_fp8(from, to, to_scales, format, execution_on(place), stream_of(stream)));
}

void dequantize_rows(nb::handle q, nb::handle scales, nb::handle x, int device, std::uintptr_t stream) {
  const Place place{device >= 0, device >= 0 ? device : 0};
  const TensorView from = view_of(q, place, "dequantize", "x");
  const TensorView with = view_of(scales, place, "dequantize", "scales");
  const TensorView to = view_of(x, place, "dequantize", "out");
  const auto call = from.dtype == DType::kInt8 ? dequantize_int8 : dequantize_fp8;
  raise_if_error(call(from, with, to, execution_on(place), stream_of(stream)));
}

void define_routing(nb::module_& module) {
  nb::class_<PlacedRouting>(module, "Routing")
      .def(nb::init<>())  // belongs to no group: calls refuse it
      .def_prop_ro("num_tokens", [](const PlacedRouting& self) { return self.routing.num_tokens(); })
      .def_prop_ro("num_topk", [](const PlacedRouting& self) { return self.routing.num_topk(); })
      .def_prop_ro("num_experts", [](const PlacedRouting& self) { return self.routing.num_experts(); })
      .def_prop_ro("num_local_experts", [](const PlacedRouting& self) { return self.routing.num_local_experts(); })
      .def_prop_ro("layout", [](const PlacedRouting& self) { return static_cast<int>(self.routing.layout()); })
      .def_prop_ro("num_recv_rows", [](const PlacedRouting& self) { return self.routing.num_recv_rows(); })
      .def_prop_ro("num_used_rows",
                   [](const PlacedRouting& self) {
                     const GilReleased released;
                     return self.routing.num_used_rows();
                   })
      .def("may_repeat_experts",
           [](const PlacedRouting& self) {
             const GilReleased released;
             return self.routing.may_repeat_experts();
           })
      .def("num_rows_per_local_expert",
           [](const PlacedRouting& self) { return waited_list(self, &Routing::num_rows_per_local_expert); })
      .def("expert_row_offsets",
           [](const PlacedRouting& self) { return waited_list(self, &Routing::expert_row_offsets); })
      .def("num_rows_from_rank",
           [](const PlacedRouting& self) { return waited_list(self, &Routing::num_rows_from_rank); })
      .def("num_rows_to_rank", [](const PlacedRouting& self) { return waited_list(self, &Routing::num_rows_to_rank); })
      .def("local_expert_ids", [](const PlacedRouting& self) { return list_of(self.routing.local_expert_ids()); })
      .def("source_ranges", [](nb::handle self) { return table(self, &Routing::source_ranges); })
      .def("slots", [](nb::handle self) { return table(self, &Routing::slots); })
      .def("source", [](nb::handle self) { return table(self, &Routing::source); })
      .def("topk_idx", [](nb::handle self) { return table(self, &Routing::topk_idx); })
      .def("topk_weights", [](nb::handle self) { return table(self, &Routing::topk_weights); })
      .def("num_recv_rows_view", [](nb::handle self) { return table(self, &Routing::num_recv_rows_view); })
      .def_prop_ro("num_physical_experts",
                   [](const PlacedRouting& self) { return self.routing.num_physical_experts(); })
      .def("num_rows_per_expert_view", [](nb::handle self) { return table(self, &Routing::num_rows_per_expert_view); })
      .def("num_rows_per_local_expert_view",
           [](nb::handle self) { return table(self, &Routing::num_rows_per_local_expert_view); })
      .def("expert_row_offsets_view", [](nb::handle self) { return table(self, &Routing::expert_row_offsets_view); });
}

}  // namespace

NB_MODULE(_native, module) {
  // Tensors that a program still holds when the interpreter ends are not a leak.
  nb::set_leak_warnings(false);
  nb::class_<Bootstrap>(module, "Bootstrap");
  nb::class_<PlacedBuffer>(module, "Buffer").def("array", [](nb::handle self) {
    const auto& placed = nb::cast<const PlacedBuffer&>(self);
    return bytes_array(placed.buffer.data(), placed.buffer.size_bytes(), placed.place, self);
  });
  define_routing(module);
  define_calls(module);
  deep_ep::define_calls(module);
  define_latency(module);
  define_balance(module);
  define_gating(module);
  define_membership(module);
  nb::class_<Placement>(module, "Placement")
      .def("__init__",
           [](Placement* self, std::vector<std::int32_t> physical_to_logical,
              std::vector<std::int32_t> physical_to_rank, int choice, bool allow_homeless) {
             new (self) Placement{std::move(physical_to_logical),
                                  std::move(physical_to_rank),
                                  static_cast<ReplicaChoice>(choice),
                                  {},
                                  allow_homeless};
           })
      .def("surviving",
           [](const Placement& self, std::int64_t num_experts, int num_ranks, const std::vector<int>& kept_ranks) {
             const Placement left = value_or_raise(surviving_placement(self, num_experts, num_ranks, kept_ranks));
             return nb::make_tuple(left.physical_to_logical, left.physical_to_rank, static_cast<int>(left.choice));
           });
  nb::class_<PyGroup>(module, "Group")
      .def_prop_ro("rank", &PyGroup::rank)
      .def_prop_ro("num_ranks", &PyGroup::num_ranks)
      .def_prop_ro("ranks_per_node", &PyGroup::ranks_per_node)
      .def_prop_ro("backend", &PyGroup::backend)
      .def("allocate", &PyGroup::allocate)
      .def("memory_usage", &PyGroup::memory_usage)
      .def("trim", &PyGroup::trim)
      .def("network_usage", &PyGroup::network_usage)
      .def("wait_times_ns", &PyGroup::wait_times_ns)
      .def("channel_tables", &PyGroup::channel_tables)
      .def("latency_update_mask", &PyGroup::latency_update_mask, "rank"_a.none(), "masked"_a, "stream"_a)
      .def("latency_query_mask", &PyGroup::latency_query_mask)
      .def("latency_clear_mask", &PyGroup::latency_clear_mask)
      .def("suspend", &PyGroup::suspend)
      .def("renew", &PyGroup::renew)
      .def("calls", &PyGroup::calls)
      .def("wait", &PyGroup::wait)
      .def("poll", &PyGroup::poll)
      .def("enter_pool", [](PyGroup& self) { self.pool().enter(); })
      .def("leave_pool", [](PyGroup&) { SymmetricPool::leave(); })
      .def("raise_pool_error", &PyGroup::raise_pool_error)
      .def("reclaim_segments", [](PyGroup& self) { self.pool().reclaim(); })
      .def("refuse_in_handler", &PyGroup::refuse_in_handler)
      .def("destroy", &PyGroup::destroy);
  module.def("dispatch_layout", &count_layout);
  module.def("quantize", &quantize_rows, "x"_a, "q"_a, "scales"_a, "mode"_a, "device"_a, "stream"_a);
  module.def("dequantize", &dequantize_rows, "q"_a, "scales"_a, "x"_a, "device"_a, "stream"_a);
  module.def("create_group", &PyGroup::create);
  module.def("callback_bootstrap", &callback_bootstrap);
  module.def("environment_bootstrap", &environment_bootstrap);
  module.def("version", [] { return std::string(version()); });
  module.def("commit", [] { return std::string(commit()); });
  module.def("backends", [] {
    nb::list list;
    for (const BackendInfo& info : backends()) {
      list.append(nb::make_tuple(info.name, info.available, info.reason));
    }
    return list;
  });
}

}  // namespace ferry::python

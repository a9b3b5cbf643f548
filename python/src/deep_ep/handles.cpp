/// Handles of the first generation's throughput mode, and the routings that belong to them.

#include <algorithm>
#include <string>
#include <utility>

#include "arguments.hpp"
#include "deep_ep/buffer_calls.hpp"
#include "objects.hpp"

namespace nb = nanobind;

namespace ferry::python::deep_ep {
namespace {

/// Form of a handle, see deep_ep._handles.
struct HandleForm {
  std::size_t size;
  std::size_t carrier;
  std::size_t source;  ///< table with a row for each received row
  std::size_t token_in_rank;
};
constexpr HandleForm kOneNode{6, 0, 3, 4};
constexpr HandleForm kSeveralNodes{10, 6, 7, 0};
constexpr std::int64_t kMetaBytes = 8;

/// (ferry.Routing, whether it was made from the expert ids), on the storage of a handle's carrier.
const Name& link_name() {
  static const Name name("_ferry_routing");
  return name;
}

}  // namespace

BufferCalls::Plan BufferCalls::plan_of(nb::handle handle) const {
  const HandleForm& form = has_several_nodes() ? kSeveralNodes : kOneNode;
  const nb::handle tensor_type = calls_->allocator().tensor_type();
  Plan plan;
  if (!is_sequence(handle) || nb::len(handle) <= form.carrier) return plan;
  const nb::object carrier = handle[form.carrier];
  if (nb::isinstance(carrier, tensor_type)) {
    nb::object link = find_link(carrier, link_name());
    if (link.is_valid() && is_of_group(nb::object(link[0]), group_)) {
      plan.routing = link[0];
      plan.knows_topk = nb::object(link[1]).is(nb::handle(Py_True));
      plan.link = std::move(link);
      return plan;
    }
  }
  // Tensors without a link are copies if there are as many as a handle has, on the device. Dtypes and shapes are left
  // to the call's checks: a rank with a wrong one has to announce the same collectives as the other ranks.
  if (nb::len(handle) != form.size) return plan;
  for (std::size_t i = 0; i < form.size; ++i) {
    if (!is_tensor_of(*calls_, nb::object(handle[i]))) return plan;
  }
  plan.routes = true;
  plan.knows_topk = false;
  return plan;
}

BufferCalls::HandleTensors BufferCalls::tensors_of(const Checks& checks, nb::handle handle) const {
  const HandleForm& form = has_several_nodes() ? kSeveralNodes : kOneNode;
  const std::int64_t num_ranks = calls_->group().num_ranks();
  if (!is_sequence(handle) || nb::len(handle) != form.size) {
    checks.refuse("handle is " +
                  (is_sequence(handle) ? std::to_string(nb::len(handle)) + " elements" : "a " + class_name(handle)) +
                  ", expected the " + std::to_string(form.size) + " tensors that dispatch returned");
  }
  HandleTensors found{handle[form.carrier], handle[form.token_in_rank]};
  const nb::object source = handle[form.source];
  const auto read_mask = [&] {
    found.num_tokens =
        checks.table(found.token_in_rank, "handle's is_token_in_rank", DType::kUint8, {"T", num_ranks}, true).extent(0);
  };
  if (has_several_nodes()) {
    read_mask();
    checks.table(found.carrier, "handle's recv_gbl_rank_prefix_sum", DType::kInt32, {num_ranks});
    found.num_rows = checks.table(source, "handle's recv_src_meta", DType::kUint8, {"N", kMetaBytes}).extent(0);
  } else {
    checks.table(found.carrier, "handle's rank_prefix_matrix", DType::kInt32, {num_ranks, num_ranks});
    found.num_rows = checks.table(source, "handle's recv_src_idx", DType::kInt32, {"N"}).extent(0);
    read_mask();
  }
  return found;
}

const Routing& BufferCalls::routing_of(Turn& turn, Plan& plan, const Checks& checks, nb::handle handle,
                                       const HandleTensors& tensors, int num_sms) const {
  if (plan.routes) {
    const nb::object ids = steps_.attr("ids_of_mask")(tensors.token_in_rank);
    RouteOptions options;
    options.num_experts = calls_->group().num_ranks();
    // A bound on the rows spares the host the wait for counts. 0 would mean unbounded.
    options.max_recv_rows = std::max<std::int64_t>(1, tensors.num_rows);
    options.num_sms = num_sms;
    const PlacedRouting placed = route(turn, Collective::kRoute, read_tensor(ids, calls_->place()), options);
    plan.routing = new_routing(placed, true);
    link_carrier(tensors.carrier, plan.routing, false);
    plan.routes = false;
  }
  if (!plan.routing.is_valid()) {
    // A copy with an element that no call uses and that is no tensor on the device.
    const std::size_t size = nb::len(handle);
    for (std::size_t i = 0; i < size; ++i) {
      checks.tensor(nb::object(handle[i]), "handle[" + std::to_string(i) + "]");
    }
    checks.refuse("handle is not of this buffer, expected the tensors that dispatch returned");
  }
  return Calls::native_of(plan.routing);
}

void BufferCalls::link_handle(const nb::tuple& handle, nb::object routing, bool knows_topk) const {
  link_carrier(handle[has_several_nodes() ? kSeveralNodes.carrier : kOneNode.carrier], std::move(routing), knows_topk);
}

void BufferCalls::link_carrier(const nb::object& carrier, nb::object routing, bool knows_topk) const {
  attach_link(carrier, link_name(), named_tuple(types_.link, nb::make_tuple(std::move(routing), knows_topk)));
}

}  // namespace ferry::python::deep_ep

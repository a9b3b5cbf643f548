/// C interface of route, dispatch and combine.
///
/// A rank whose structs cannot be read still makes the call, with empty arguments: every rank refuses these, so that no
/// rank waits for this one.

#include "ferry/exchange.hpp"

#include <functional>

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/placement.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/channel_tables.hpp"
#include "ferry/group.hpp"

namespace ferry::c {
namespace {

constexpr const char* kNoGroup = "the group is null";
constexpr const char* kNoRouting = "the pointer to the routing is null";

/// Tables that the caller's function asks for.
EarlyTables ask_for_tables(ferry_while_waiting while_waiting, void* user) {
  ferry_early_tables asked{};
  asked.struct_size = sizeof(asked);
  while_waiting(user, &asked);
  EarlyTables tables;
  tables.num_channels = asked.num_channels;
  tables.out = {tensor_view(asked.rank_prefix), tensor_view(asked.send_channel_prefix),
                tensor_view(asked.recv_channel_prefix), tensor_view(asked.source_token), tensor_view(asked.send_index)};
  return tables;
}

Status read_route(const char* call, const ferry_route_input* given_input, const ferry_route_options* given_options,
                  RouteInput& input, RouteOptions& options, std::function<EarlyTables()>& while_waiting) {
  ferry_route_input in;
  if (Status status = read_struct(call, given_input, in); !status.ok()) return status;
  ferry_route_options read;
  if (Status status = read_struct(call, given_options, read); !status.ok()) return status;
  input.topk_idx = tensor_view(in.topk_idx);
  input.topk_weights = tensor_view(in.topk_weights);
  options.num_experts = read.num_experts;
  options.layout = static_cast<Layout>(read.layout);
  options.expert_alignment = nonzero_or(read.expert_alignment, options.expert_alignment);
  options.slab_capacity = read.slab_capacity;
  options.max_recv_rows = read.max_recv_rows;
  options.max_tokens = read.max_tokens;
  options.num_sms = read.num_sms;
  if (read.while_waiting != nullptr) {
    while_waiting = [function = read.while_waiting, user = read.user] { return ask_for_tables(function, user); };
  }
  if (Status status = read_placement(call, read.placement, options.placement); !status.ok()) return status;
  if (Status status = read_counters(call, read.counters, options.counters); !status.ok()) return status;
  return read_experts(call, read.expert_to_rank, read.num_expert_to_rank, read.num_experts, options.expert_to_rank);
}

Status route(ferry_group* group, const ferry_route_input* given_input, const ferry_route_options* given_options,
             void* stream, ferry_routing** handle) {
  constexpr const char* kCall = "ferry_route";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  RouteInput input;
  RouteOptions options;
  std::function<EarlyTables()> while_waiting;
  Status status = handle == nullptr ? invalid(kCall, kNoRouting)
                                    : read_route(kCall, given_input, given_options, input, options, while_waiting);
  if (!status.ok()) {
    (void)group->value->route({}, {});
    return status;
  }
  auto made = std::make_unique<ferry_routing>();
  Result<Routing> routing = group->value->route(input, options, to_stream(stream), while_waiting);
  if (!routing.ok()) return routing.status();
  made->value = std::move(*routing);
  *handle = made.release();
  return {};
}

Status read_dispatch(const char* call, const ferry_dispatch_input* given_input,
                     const ferry_dispatch_output* given_output, const ferry_dispatch_options* given_options,
                     DispatchInput& input, DispatchOutput& output, DispatchOptions& options) {
  ferry_dispatch_input in;
  if (Status status = read_struct(call, given_input, in); !status.ok()) return status;
  ferry_dispatch_output out;
  if (Status status = read_struct(call, given_output, out); !status.ok()) return status;
  ferry_dispatch_options read;
  if (Status status = read_struct(call, given_options, read); !status.ok()) return status;
  input.x = tensor_view(in.x);
  input.scales = tensor_view(in.scales);
  input.topk_weights = tensor_view(in.topk_weights);
  output.x = tensor_view(out.x);
  output.scales = tensor_view(out.scales);
  output.topk_idx = tensor_view(out.topk_idx);
  output.topk_weights = tensor_view(out.topk_weights);
  output.source = tensor_view(out.source);
  options.zero_padding = read.zero_padding != 0;
  options.quantize = static_cast<Quantization>(read.quantize);
  options.clear_if_refused = read.clear_if_refused != 0;
  options.kernel = kernel_options(read);
  return {};
}

Status dispatch(ferry_group* group, const ferry_routing* routing, const ferry_dispatch_input* given_input,
                const ferry_dispatch_output* given_output, const ferry_dispatch_options* given_options, void* stream) {
  constexpr const char* kCall = "ferry_dispatch";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  DispatchInput input;
  DispatchOutput output;
  DispatchOptions options;
  Status status = read_dispatch(kCall, given_input, given_output, given_options, input, output, options);
  if (!status.ok()) {
    (void)group->value->dispatch({}, {}, {});
    return status;
  }
  return group->value->dispatch(routing_of(routing), input, output, to_stream(stream), options);
}

Status read_combine(const char* call, const ferry_combine_input* given_input, const ferry_combine_output* given_output,
                    const ferry_combine_options* given_options, CombineInput& input, CombineOutput& output,
                    CombineOptions& options) {
  ferry_combine_input in;
  if (Status status = read_struct(call, given_input, in); !status.ok()) return status;
  ferry_combine_output out;
  if (Status status = read_struct(call, given_output, out); !status.ok()) return status;
  ferry_combine_options read;
  if (Status status = read_struct(call, given_options, read); !status.ok()) return status;
  input.x = tensor_view(in.x);
  input.weights = tensor_view(in.weights);
  input.bias = {tensor_view(in.bias[0]), tensor_view(in.bias[1])};
  input.topk_weights = tensor_view(in.topk_weights);
  output.x = tensor_view(out.x);
  output.weights = tensor_view(out.weights);
  options.weighted = read.weighted != 0;
  options.wire_format = static_cast<WireFormat>(read.wire_format);
  options.kernel = kernel_options(read);
  return {};
}

Status combine(ferry_group* group, const ferry_routing* routing, const ferry_combine_input* given_input,
               const ferry_combine_output* given_output, const ferry_combine_options* given_options, void* stream) {
  constexpr const char* kCall = "ferry_combine";
  if (group == nullptr) return invalid(kCall, kNoGroup);
  CombineInput input;
  CombineOutput output;
  CombineOptions options;
  Status status = read_combine(kCall, given_input, given_output, given_options, input, output, options);
  if (!status.ok()) {
    (void)group->value->combine({}, {}, {});
    return status;
  }
  return group->value->combine(routing_of(routing), input, output, to_stream(stream), options);
}

}  // namespace
}  // namespace ferry::c

using ferry::c::guarded;

ferry_status* ferry_route(ferry_group* group, const ferry_route_input* input, const ferry_route_options* options,
                          void* stream, ferry_routing** routing) {
  return guarded([&] { return ferry::c::route(group, input, options, stream, routing); });
}

ferry_status* ferry_dispatch(ferry_group* group, const ferry_routing* routing, const ferry_dispatch_input* input,
                             const ferry_dispatch_output* output, const ferry_dispatch_options* options, void* stream) {
  return guarded([&] { return ferry::c::dispatch(group, routing, input, output, options, stream); });
}

ferry_status* ferry_combine(ferry_group* group, const ferry_routing* routing, const ferry_combine_input* input,
                            const ferry_combine_output* output, const ferry_combine_options* options, void* stream) {
  return guarded([&] { return ferry::c::combine(group, routing, input, output, options, stream); });
}

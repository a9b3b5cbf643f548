/// C interface of the tables that describe a routing and of the dispatch layout.

#include "c/convert.hpp"
#include "c/handles.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/channel_tables.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/group.hpp"

namespace ferry::c {
namespace {

Status channel_tables(ferry_group* group, const ferry_routing* routing, std::int32_t num_channels,
                      const ferry_channel_tables_output* given, void* stream) {
  constexpr const char* kCall = "ferry_channel_tables";
  if (group == nullptr) return invalid(kCall, "the group is null");
  ferry_channel_tables_output read;
  if (Status status = read_struct(kCall, given, read); !status.ok()) return status;
  const ChannelTables output{tensor_view(read.rank_prefix), tensor_view(read.send_channel_prefix),
                             tensor_view(read.recv_channel_prefix), tensor_view(read.source_token),
                             tensor_view(read.send_index)};
  return group->value->channel_tables(routing_of(routing), num_channels, output, to_stream(stream));
}

Status layout(const ferry_tensor* topk_idx, const ferry_dispatch_layout_options* given_options,
              const ferry_dispatch_layout_output* given_output, void* stream) {
  constexpr const char* kCall = "ferry_dispatch_layout";
  ferry_dispatch_layout_options read;
  if (Status status = read_struct(kCall, given_options, read); !status.ok()) return status;
  ferry_dispatch_layout_output out;
  if (Status status = read_struct(kCall, given_output, out); !status.ok()) return status;
  DispatchLayoutOptions options;
  options.num_experts = read.num_experts;
  options.num_ranks = nonzero_or(read.num_ranks, options.num_ranks);
  options.ranks_per_node = read.ranks_per_node;
  options.expert_to_rank = tensor_view(read.expert_to_rank);
  if (read.backend != nullptr) options.backend = read.backend;
  if (read.use_device != 0) options.device = read.device;
  const DispatchLayout output{tensor_view(out.num_tokens_per_rank), tensor_view(out.num_tokens_per_node),
                              tensor_view(out.num_tokens_per_expert), tensor_view(out.is_token_in_rank)};
  return dispatch_layout(tensor_view(topk_idx), options, output, to_stream(stream));
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_channel_tables(ferry_group* group, const ferry_routing* routing, int32_t num_channels,
                                   const ferry_channel_tables_output* output, void* stream) {
  return guarded([&] { return channel_tables(group, routing, num_channels, output, stream); });
}

ferry_status* ferry_dispatch_layout(const ferry_tensor* topk_idx, const ferry_dispatch_layout_options* options,
                                    const ferry_dispatch_layout_output* output, void* stream) {
  return guarded([&] { return layout(topk_idx, options, output, stream); });
}

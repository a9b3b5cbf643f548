/// C interface of the expansion of rows by token into rows by expert, and of the reduction back.

#include "ferry/expansion.hpp"

#include "c/convert.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"
#include "ferry/arrival_tables.hpp"

namespace ferry::c {
namespace {

Status make_tables(const ferry_arrivals* given, const ferry_arrival_tables_options* given_options,
                   const ferry_arrival_tables_output* given_output, void* stream) {
  constexpr const char* kCall = "ferry_arrival_tables";
  ferry_arrivals in;
  if (Status status = read_struct(kCall, given, in); !status.ok()) return status;
  ferry_arrival_tables_options read;
  if (Status status = read_struct(kCall, given_options, read); !status.ok()) return status;
  ferry_arrival_tables_output out;
  if (Status status = read_struct(kCall, given_output, out); !status.ok()) return status;
  ArrivalTablesOptions options;
  options.num_ranks = nonzero_or(read.num_ranks, options.num_ranks);
  options.max_tokens = nonzero_or(read.max_tokens, options.max_tokens);
  options.expert_alignment = nonzero_or(read.expert_alignment, options.expert_alignment);
  options.expand = read.expand != 0;
  if (read.backend != nullptr) options.backend = read.backend;
  if (read.use_device != 0) options.device = read.device;
  const Arrivals arrivals{tensor_view(in.source), tensor_view(in.topk_idx), tensor_view(in.rows_per_expert),
                          tensor_view(in.sent_idx)};
  const ArrivalTables tables{tensor_view(out.origin),         tensor_view(out.rows_through_rank),
                             tensor_view(out.expert_ends),    tensor_view(out.sent_idx),
                             tensor_view(out.rows_of_expert), tensor_view(out.last_equal)};
  return arrival_tables(arrivals, options, tables, to_stream(stream));
}

Status read_options(const char* call, const ferry_expansion_options* given, ExpansionOptions& options) {
  ferry_expansion_options read;
  if (Status status = read_struct(call, given, read); !status.ok()) return status;
  options.zero_padding = read.zero_padding != 0;
  if (read.backend != nullptr) options.backend = read.backend;
  if (read.use_device != 0) options.device = read.device;
  return {};
}

Status expand(const ferry_expand_input* given_input, const ferry_expansion_options* given_options,
              const ferry_expand_output* given_output, void* stream) {
  constexpr const char* kCall = "ferry_expand_rows";
  ferry_expand_input in;
  if (Status status = read_struct(kCall, given_input, in); !status.ok()) return status;
  ExpansionOptions options;
  if (Status status = read_options(kCall, given_options, options); !status.ok()) return status;
  ferry_expand_output out;
  if (Status status = read_struct(kCall, given_output, out); !status.ok()) return status;
  const ExpandInput input{tensor_view(in.slots), tensor_view(in.x), tensor_view(in.scales), tensor_view(in.weights),
                          tensor_view(in.last_equal)};
  const ExpandOutput output{tensor_view(out.x), tensor_view(out.scales), tensor_view(out.weights),
                            tensor_view(out.row_of_slot)};
  return expand_rows(input, options, output, to_stream(stream));
}

Status reduce(const ferry_reduce_input* given_input, const ferry_expansion_options* given_options,
              const ferry_reduce_output* given_output, void* stream) {
  constexpr const char* kCall = "ferry_reduce_rows";
  ferry_reduce_input in;
  if (Status status = read_struct(kCall, given_input, in); !status.ok()) return status;
  ExpansionOptions options;
  if (Status status = read_options(kCall, given_options, options); !status.ok()) return status;
  ferry_reduce_output out;
  if (Status status = read_struct(kCall, given_output, out); !status.ok()) return status;
  const ReduceInput input{tensor_view(in.slots), tensor_view(in.x), tensor_view(in.weights),
                          tensor_view(in.last_equal)};
  const ReduceOutput output{tensor_view(out.x), tensor_view(out.weights)};
  return reduce_rows(input, options, output, to_stream(stream));
}

}  // namespace
}  // namespace ferry::c

using ferry::c::guarded;

ferry_status* ferry_arrival_tables(const ferry_arrivals* arrivals, const ferry_arrival_tables_options* options,
                                   const ferry_arrival_tables_output* output, void* stream) {
  return guarded([&] { return ferry::c::make_tables(arrivals, options, output, stream); });
}

ferry_status* ferry_expand_rows(const ferry_expand_input* input, const ferry_expansion_options* options,
                                const ferry_expand_output* output, void* stream) {
  return guarded([&] { return ferry::c::expand(input, options, output, stream); });
}

ferry_status* ferry_reduce_rows(const ferry_reduce_input* input, const ferry_expansion_options* options,
                                const ferry_reduce_output* output, void* stream) {
  return guarded([&] { return ferry::c::reduce(input, options, output, stream); });
}

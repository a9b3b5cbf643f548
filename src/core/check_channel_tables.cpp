#include <fmt/format.h>

#include "core/checks.hpp"

namespace ferry {
namespace {

Status invalid_channels(std::string message) {
  return Status(ErrorCode::kInvalidArgument, "channel_tables: " + std::move(message));
}

Status take(std::string_view what, const TensorView& out, std::initializer_list<std::int64_t> shape,
            std::int32_t** pointer) {
  if (!out.present()) return {};
  *pointer = static_cast<std::int32_t*>(out.data);
  return check_table(what, out, shape, {DType::kInt32});
}

}  // namespace

Status check_channel_tables(const ChannelTablesShape& shape, int num_channels, const ChannelTables& out,
                            ChannelTablesCall& call) {
  const int num_ranks = shape.num_ranks;
  if (shape.layout != Layout::kTokens)
    return invalid_channels("the Routing groups rows by expert, expected layout kTokens");
  if (num_channels < 1 || num_channels > kMaxChannels) {
    return invalid_channels(fmt::format("num_channels is {}, expected 1 to {}", num_channels, kMaxChannels));
  }
  call.num_channels = num_channels;
  call.num_rows = shape.num_rows;
  Status status = take("channel_tables: rank_prefix", out.rank_prefix, {num_ranks, num_ranks}, &call.rank_prefix);
  if (status.ok()) {
    status = take("channel_tables: send_channel_prefix", out.send_channel_prefix, {num_ranks, num_channels},
                  &call.send_channel_prefix);
  }
  if (status.ok()) {
    status = take("channel_tables: recv_channel_prefix", out.recv_channel_prefix, {num_ranks, num_channels},
                  &call.recv_channel_prefix);
  }
  if (status.ok())
    status = take("channel_tables: source_token", out.source_token, {shape.num_rows}, &call.source_token);
  if (status.ok())
    status = take("channel_tables: send_index", out.send_index, {shape.num_tokens, num_ranks}, &call.send_index);
  return status;
}

}  // namespace ferry

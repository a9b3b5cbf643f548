#include "ferry/dispatch_layout.hpp"

#include <fmt/format.h>

#include <limits>
#include <string>

#include "core/checks.hpp"
#include "local/local_ops.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

Status invalid_layout(std::string message) {
  return Status(ErrorCode::kInvalidArgument, "dispatch_layout: " + std::move(message));
}

Status check_options(const DispatchLayoutOptions& options) {
  if (options.num_experts < 1 || options.num_experts > kMaxCount) {
    return invalid_layout(fmt::format("num_experts is {}, expected 1 to {}", options.num_experts, kMaxCount));
  }
  if (options.num_ranks < 1 || options.num_ranks > std::numeric_limits<std::int16_t>::max()) {
    return invalid_layout(
        fmt::format("num_ranks is {}, expected 1 to {}", options.num_ranks, std::numeric_limits<std::int16_t>::max()));
  }
  if (options.ranks_per_node < 0) {
    return invalid_layout(fmt::format("ranks_per_node is {}, expected 0 (all) or more", options.ranks_per_node));
  }
  if (!options.expert_to_rank.present()) return {};
  return check_table("dispatch_layout: expert_to_rank", options.expert_to_rank, {options.num_experts}, {DType::kInt32});
}

Status check_ids(const ConstTensorView& topk_idx) {
  if (topk_idx.num_dims != 2) return invalid_layout(fmt::format("topk_idx is {}, expected [T, K]", describe(topk_idx)));
  const std::int64_t num_topk = topk_idx.extent(1);
  if (num_topk < 1 || num_topk > kMaxTopk || topk_idx.extent(0) < 0 || topk_idx.extent(0) > kMaxCount / num_topk) {
    return invalid_layout(fmt::format("topk_idx is {}, expected K from 1 to {} and at most {} entries",
                                      describe(topk_idx), kMaxTopk, kMaxCount));
  }
  return check_table("dispatch_layout: topk_idx", topk_idx, {topk_idx.extent(0), num_topk},
                     {DType::kInt32, DType::kInt64});
}

Status check_output(std::string_view what, const TensorView& out, std::initializer_list<std::int64_t> shape,
                    DType dtype) {
  if (!out.present()) return {};
  return check_table(what, out, shape, {dtype});
}

Status check_outputs(const DispatchLayout& out, const plan::TokenLayoutParams& params) {
  Status status = check_output("dispatch_layout: output num_tokens_per_rank", out.num_tokens_per_rank,
                               {params.num_ranks}, DType::kInt32);
  if (status.ok()) {
    status = check_output("dispatch_layout: output num_tokens_per_node", out.num_tokens_per_node, {params.num_nodes()},
                          DType::kInt32);
  }
  if (status.ok()) {
    status = check_output("dispatch_layout: output num_tokens_per_expert", out.num_tokens_per_expert,
                          {params.num_experts}, DType::kInt32);
  }
  if (status.ok()) {
    status = check_output("dispatch_layout: output is_token_in_rank", out.is_token_in_rank,
                          {params.num_tokens, params.num_ranks}, DType::kUint8);
  }
  return status;
}

}  // namespace

Status dispatch_layout(const ConstTensorView& topk_idx, const DispatchLayoutOptions& options, const DispatchLayout& out,
                       Stream stream) {
  const Result<const LocalOps*> ops = find_local_ops("dispatch_layout", options.backend);
  if (!ops.ok()) return ops.status();
  if (Status status = check_options(options); !status.ok()) return status;
  if (Status status = check_ids(topk_idx); !status.ok()) return status;
  const plan::TokenLayoutParams params{
      .ids = topk_idx.data,
      .wide_ids = topk_idx.dtype == DType::kInt64,
      .num_tokens = topk_idx.extent(0),
      .num_topk = static_cast<int>(topk_idx.extent(1)),
      .num_experts = options.num_experts,
      .num_ranks = options.num_ranks,
      .ranks_per_node = options.ranks_per_node == 0 ? options.num_ranks : options.ranks_per_node,
      .expert_to_rank = static_cast<const std::int32_t*>(options.expert_to_rank.data),
      .tokens_per_rank = static_cast<std::int32_t*>(out.num_tokens_per_rank.data),
      .tokens_per_node = static_cast<std::int32_t*>(out.num_tokens_per_node.data),
      .entries_per_expert = static_cast<std::int32_t*>(out.num_tokens_per_expert.data),
      .token_in_rank = static_cast<std::uint8_t*>(out.is_token_in_rank.data)};
  if (Status status = check_outputs(out, params); !status.ok()) return status;
  return (*ops)->count_layout({"dispatch_layout", options.device, stream}, params);
}

}  // namespace ferry

#include "gemm_beside_calls.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace ferry::bench {
namespace {

std::vector<std::int64_t> pick_experts(const GemmBesidePlan& plan, int rank, std::int64_t num_tokens) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) + 1);
  std::vector<std::int64_t> all(static_cast<std::size_t>(plan.num_experts));
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::int64_t> picked;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (int i = 0; i < plan.num_topk; ++i) {
      const auto from = static_cast<std::size_t>(i);
      std::swap(all[from], all[std::uniform_int_distribution<std::size_t>(from, all.size() - 1)(random)]);
      picked.push_back(all[from]);
    }
  }
  return picked;
}

/// Rows of the busiest expert, from all ranks.
std::int64_t slab_capacity_of(const GemmBesidePlan& plan) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(plan.num_experts));
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    for (const std::int64_t expert : pick_experts(plan, rank, plan.num_latency_tokens)) {
      ++rows[static_cast<std::size_t>(expert)];
    }
  }
  return *std::ranges::max_element(rows);
}

template <typename Value>
DeviceBytes upload(const std::vector<Value>& values) {
  DeviceBytes memory = take_device(values.size() * sizeof(Value));
  throw_if_cuda_error(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(Value), cudaMemcpyHostToDevice));
  return memory;
}

}  // namespace

Calls::Calls(const GemmBesidePlan& plan, int rank, cudaStream_t stream)
    : plan_(plan),
      stream_{stream},
      ids_(upload(pick_experts(plan, rank, plan.num_tokens))),
      latency_ids_(upload(pick_experts(plan, rank, plan.num_latency_tokens))),
      weights_(upload(std::vector<float>(static_cast<std::size_t>(plan.num_latency_tokens * plan.num_topk), 0.125F))),
      slab_capacity_(slab_capacity_of(plan)),
      num_local_(plan.num_experts / plan.num_ranks) {
  const auto most_tokens = static_cast<std::size_t>(std::max(plan.num_tokens, plan.num_latency_tokens));
  x_ = take_device(most_tokens * plan.row_bytes());
  sums_ = take_device(most_tokens * plan.row_bytes());
}

void Calls::create_group(const std::shared_ptr<Bootstrap>& bootstrap) {
  int device = 0;
  throw_if_cuda_error(cudaGetDevice(&device));
  const LatencyShape latency{.backend = "cuda",
                             .num_ranks = plan_.num_ranks,
                             .max_tokens = plan_.num_latency_tokens,
                             .num_topk = plan_.num_topk,
                             .dispatch_row_bytes = static_cast<std::int64_t>(plan_.row_bytes()),
                             .combine_row_bytes = static_cast<std::int64_t>(plan_.row_bytes()),
                             .order = CombineOrder::kRankSums};
  group_ = Group::create(bootstrap, {.backend = "cuda",
                                     .ranks_per_node = plan_.num_ranks / plan_.num_nodes,
                                     .device = device,
                                     .transport = plan_.transport,
                                     .ring_memory = plan_.ring_memory,
                                     .latency_bytes = latency_bytes_required(latency).value()})
               .value();
  RouteInput choice;
  choice.topk_idx = {ids_.get(), DType::kInt64, {plan_.num_tokens, plan_.num_topk}};
  RouteOptions options;
  options.num_experts = plan_.num_experts;
  routing_ = group_->route(choice, options, stream_).value();
  // Symmetric memory, into which peers write rows and from which they read them.
  rows_ = group_->allocate(static_cast<std::size_t>(routing_.num_recv_rows()) * plan_.row_bytes()).value();
  slab_ = group_->allocate(static_cast<std::size_t>(num_local_ * slab_capacity_) * plan_.row_bytes()).value();
}

void Calls::wait() { throw_if_error(group_->wait(stream_)); }

void Calls::destroy_group() { throw_if_error(group_->destroy()); }

std::vector<Exchange> Calls::exchanges(int num_sms) {
  const auto dispatch = [this, num_sms] { start_dispatch(num_sms); };
  const auto combine = [this, num_sms] { start_combine(num_sms); };
  const auto latency = [this, num_sms] {
    start_latency_dispatch(num_sms, /*split=*/false);
    start_latency_combine(num_sms, /*split=*/false);
  };
  const auto send_tokens = [this, num_sms] { start_latency_dispatch(num_sms, /*split=*/true); };
  const auto send_sums = [this, num_sms] {
    receive();
    start_latency_combine(num_sms, /*split=*/true);
  };
  return {{"dispatch", num_sms, {dispatch}},
          {"combine", num_sms, {combine}},
          {"latency", num_sms, {latency}},
          {"latency_split", num_sms, {send_tokens, send_sums, [this] { receive(); }}}};
}

void Calls::receive() { throw_if_error(group_->latency_receive(latency_routing_, stream_)); }

void Calls::start_dispatch(int num_sms) {
  DispatchInput in;
  in.x = {x_.get(), DType::kBfloat16, {plan_.num_tokens, plan_.hidden}};
  DispatchOutput out;
  out.x = {rows_.data(), DType::kBfloat16, {routing_.num_recv_rows(), plan_.hidden}};
  throw_if_error(group_->dispatch(routing_, in, out, stream_, {.kernel = {.num_sms = num_sms}}));
}

void Calls::start_combine(int num_sms) {
  CombineInput in;
  in.x = {rows_.data(), DType::kBfloat16, {routing_.num_recv_rows(), plan_.hidden}};
  CombineOutput out;
  out.x = {sums_.get(), DType::kBfloat16, {plan_.num_tokens, plan_.hidden}};
  throw_if_error(group_->combine(routing_, in, out, stream_, {.kernel = {.num_sms = num_sms}}));
}

void Calls::start_latency_dispatch(int num_sms, bool split) {
  LatencyDispatchInput in;
  in.x = {x_.get(), DType::kBfloat16, {plan_.num_latency_tokens, plan_.hidden}};
  in.topk_idx = {latency_ids_.get(), DType::kInt64, {plan_.num_latency_tokens, plan_.num_topk}};
  in.topk_weights = {weights_.get(), DType::kFloat32, {plan_.num_latency_tokens, plan_.num_topk}};
  LatencyDispatchOutput out;
  out.x = {slab_.data(), DType::kBfloat16, {num_local_, slab_capacity_, plan_.hidden}};
  LatencyDispatchOptions options;
  options.num_experts = plan_.num_experts;
  options.max_tokens = plan_.num_latency_tokens;
  options.slab_capacity = slab_capacity_;
  options.split = split;
  options.kernel.num_sms = num_sms;
  latency_routing_ = group_->latency_dispatch(in, out, options, stream_).value();
}

void Calls::start_latency_combine(int num_sms, bool split) {
  LatencyCombineInput in;
  in.x = {slab_.data(), DType::kBfloat16, {num_local_, slab_capacity_, plan_.hidden}};
  LatencyCombineOutput out;
  out.x = {sums_.get(), DType::kBfloat16, {plan_.num_latency_tokens, plan_.hidden}};
  throw_if_error(
      group_->latency_combine(latency_routing_, in, out, stream_,
                              {.order = CombineOrder::kRankSums, .split = split, .kernel = {.num_sms = num_sms}}));
}

}  // namespace ferry::bench

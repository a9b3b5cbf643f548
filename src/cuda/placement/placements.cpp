#include "cuda/placement/placements.hpp"

#include <algorithm>
#include <numeric>

#include "cuda/driver/cuda_call.hpp"

namespace ferry::cuda {
namespace {

/// Placements kept for later routes: more than a program uses in turn, one for each layer of a model.
constexpr std::size_t kMaxRecent = 128;

template <typename T>
Status upload_table(T* to, const std::vector<T>& table, cudaStream_t stream) {
  return runtime_status(cudaMemcpyAsync(to, table.data(), table.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
                        "route: uploading the expert placement");
}

bool same(const ExpertPlacement& a, const ExpertPlacement& b) {
  return a.hash == b.hash && a.given == b.given && a.choice == b.choice && a.allow_homeless == b.allow_homeless &&
         a.on_device == b.on_device && a.num_logical_experts == b.num_logical_experts &&
         a.expert_to_rank == b.expert_to_rank && a.physical_to_logical == b.physical_to_logical;
}

}  // namespace

Result<std::shared_ptr<const Placement>> Placements::find(const std::shared_ptr<const ExpertPlacement>& wanted) {
  const auto found = std::find_if(recent_.rbegin(), recent_.rend(), [&wanted](const auto& one) {
    return one->made_of == wanted || same(*one->made_of, *wanted);
  });
  if (found != recent_.rend()) return *found;
  Result<std::shared_ptr<const Placement>> placement = upload(wanted);
  if (!placement.ok()) return placement;
  if (recent_.size() == kMaxRecent) recent_.erase(recent_.begin());
  recent_.push_back(*placement);
  return placement;
}

Result<std::shared_ptr<const Placement>> Placements::upload(const std::shared_ptr<const ExpertPlacement>& made_of) {
  const std::vector<std::int32_t>& expert_to_rank = made_of->expert_to_rank;
  const std::size_t num_experts = expert_to_rank.size();
  std::vector<std::int32_t> by_owner(num_experts);
  std::iota(by_owner.begin(), by_owner.end(), 0);
  std::stable_sort(by_owner.begin(), by_owner.end(), [&](std::int32_t a, std::int32_t b) {
    return expert_to_rank[static_cast<std::size_t>(a)] < expert_to_rank[static_cast<std::size_t>(b)];
  });
  std::vector<std::int32_t> first_of_rank(static_cast<std::size_t>(num_ranks_) + 1, 0);
  for (std::int32_t owner : expert_to_rank) ++first_of_rank[static_cast<std::size_t>(owner) + 1];
  std::partial_sum(first_of_rank.begin(), first_of_rank.end(), first_of_rank.begin());
  std::vector<std::int32_t> local_expert(num_experts);
  auto placement = std::make_shared<Placement>();
  for (std::size_t at = 0; at < num_experts; ++at) {
    const auto expert = static_cast<std::size_t>(by_owner[at]);
    const std::int32_t owner = expert_to_rank[expert];
    local_expert[expert] = static_cast<std::int32_t>(at) - first_of_rank[static_cast<std::size_t>(owner)];
    if (owner == rank_) placement->local_expert_ids.push_back(by_owner[at]);
  }
  placement->made_of = made_of;

  const auto num_ranks = static_cast<std::size_t>(num_ranks_);
  const std::size_t num_logical = made_of->homes.ranges.size();
  Result<std::shared_ptr<std::byte>> memory =
      memory_->take(PlacementParts::at(nullptr, num_experts, num_ranks, num_logical).size_bytes);
  if (!memory.ok()) return memory.status();
  placement->memory = *memory;
  const auto parts = PlacementParts::at(memory->get(), num_experts, num_ranks, num_logical);

  const RelaxedCapture relaxed;
  const cudaStream_t stream = stream_->get();
  Status status = upload_table(parts.owner, expert_to_rank, stream);
  if (status.ok()) status = upload_table(parts.local_expert, local_expert, stream);
  if (status.ok()) status = upload_table(parts.by_owner, by_owner, stream);
  if (status.ok()) status = upload_table(parts.first_of_rank, first_of_rank, stream);
  if (num_logical > 0) {
    if (status.ok()) status = upload_table(parts.ranges, made_of->homes.ranges, stream);
    if (status.ok()) status = upload_table(parts.homes, made_of->homes.homes, stream);
    if (status.ok()) status = upload_table(parts.logical_of, made_of->physical_to_logical, stream);
  }
  if (status.ok()) status = runtime_status(cudaStreamSynchronize(stream), "route: uploading the expert placement");
  if (!status.ok()) return status;
  placement->tables = {parts.owner,
                       parts.local_expert,
                       parts.by_owner,
                       parts.first_of_rank,
                       {parts.ranges, parts.homes, parts.logical_of, static_cast<int>(num_logical)}};
  return std::shared_ptr<const Placement>(std::move(placement));
}

}  // namespace ferry::cuda

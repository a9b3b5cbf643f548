#include "cuda/intranode/homes.hpp"

#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

std::size_t carve(std::byte* base, HomesParams& params) {
  plan::Carver carver(base);
  params.check = carver.take<HomesCheck>(1);
  params.ranges = carver.take<plan::HomeRange>(to_size(params.num_logical));
  params.homes = carver.take<std::int32_t>(to_size(params.num_physical));
  params.logical_of = carver.take<std::int32_t>(to_size(params.num_physical));
  return carver.used_bytes();
}

}  // namespace

Result<BuiltHomes> prepare_homes(const RouteCall& call, TableMemory& memory, const HomesOf& of) {
  BuiltHomes built;
  const ExpertPlacement& placement = *call.placement;
  if (!placement.on_device) return built;
  HomesParams& params = built.params;
  params.physical_to_logical = static_cast<const std::int32_t*>(call.options.placement.physical_to_logical_view.data);
  params.owner = of.owner;
  params.num_physical = static_cast<int>(placement.expert_to_rank.size());
  params.num_logical = static_cast<int>(placement.num_logical_experts);
  params.rank = of.rank;
  params.ranks_per_node = of.ranks_per_node;
  params.nearest = placement.choice == ReplicaChoice::kNearest;
  Result<std::shared_ptr<std::byte>> taken = memory.take(carve(nullptr, params));
  if (!taken.ok()) return taken.status();
  built.memory = *taken;
  carve(taken->get(), params);
  return built;
}

}  // namespace ferry::cuda

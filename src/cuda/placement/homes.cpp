#include "cuda/placement/homes.hpp"

#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

struct HomesParts {
  HomesCheck* check;
  plan::HomeRange* ranges;
  std::int32_t* homes;
  std::int32_t* logical_of;
  std::size_t size_bytes;

  static HomesParts at(std::byte* base, std::size_t num_physical, std::size_t num_logical) {
    plan::Carver carver(base);
    HomesParts parts{};
    parts.check = carver.take<HomesCheck>(1);
    parts.ranges = carver.take<plan::HomeRange>(num_logical);
    parts.homes = carver.take<std::int32_t>(num_physical);
    parts.logical_of = carver.take<std::int32_t>(num_physical);
    parts.size_bytes = carver.used_bytes();
    return parts;
  }
};

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
  params.allow_homeless = placement.allow_homeless;
  const std::size_t num_physical = placement.expert_to_rank.size();
  const std::size_t num_logical = to_size(placement.num_logical_experts);
  Result<std::shared_ptr<std::byte>> taken = memory.take(built_homes_bytes(num_physical, num_logical));
  if (!taken.ok()) return taken.status();
  built.memory = *taken;
  const HomesParts parts = HomesParts::at(taken->get(), num_physical, num_logical);
  params.check = parts.check;
  params.ranges = parts.ranges;
  params.homes = parts.homes;
  params.logical_of = parts.logical_of;
  return built;
}

std::size_t built_homes_bytes(std::size_t num_physical, std::size_t num_logical) {
  return HomesParts::at(nullptr, num_physical, num_logical).size_bytes;
}

}  // namespace ferry::cuda

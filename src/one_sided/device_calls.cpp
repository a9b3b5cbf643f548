/// Parts of a OneSided that kernels use.

#include <fmt/format.h>

#include "ferry/device/world.hpp"
#include "one_sided/core.hpp"

namespace ferry {
namespace one_sided {
namespace {

Status no_kernels(std::string_view operation, std::string_view backend) {
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("{}: backend \"{}\" has no kernels; create the OneSided with backend \"cuda\"", operation, backend));
}

}  // namespace

Result<device::World> Backend::device_world() { return no_kernels("device_world", name()); }

Result<device::TeamView> Backend::device_team(const TeamState& /*team*/) { return no_kernels("device_team", name()); }

}  // namespace one_sided

Result<device::World> OneSided::device_world() const {
  if (Status status = core_->check_usable("device_world", {}); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->device_world());
}

Result<device::TeamView> OneSided::device_team(const Team& team) const {
  if (Status status = core_->check_usable("device_team", {}); !status.ok()) return core_->noted(status);
  if (Status status = core_->check_team("device_team", team.state_.get()); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->device_team(*team.state_));
}

}  // namespace ferry

/// Puts each node of a group on a host of its own, in programs whose ranks do not name their hosts themselves.

#include <memory>
#include <utility>

#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"
#include "ucx_card/hosts.hpp"

namespace ferry::test {

// The names under which the linker's option --wrap finds Group::create and what replaces it.
Result<std::shared_ptr<Group>> real_create(std::shared_ptr<Bootstrap> bootstrap, const GroupOptions& options) __asm__(
    "__real__ZN5ferry5Group6createESt10shared_ptrINS_9BootstrapEERKNS_12GroupOptionsE");
Result<std::shared_ptr<Group>>
create_on_host(std::shared_ptr<Bootstrap> bootstrap, const GroupOptions& options) __asm__(
    "__wrap__ZN5ferry5Group6createESt10shared_ptrINS_9BootstrapEERKNS_12GroupOptionsE");

Result<std::shared_ptr<Group>> create_on_host(std::shared_ptr<Bootstrap> bootstrap, const GroupOptions& options) {
  enter_host(options.ranks_per_node > 0 ? bootstrap->rank() / options.ranks_per_node : 0);
  return real_create(std::move(bootstrap), options);
}

}  // namespace ferry::test

#ifndef FERRY_CORE_CORES_HPP
#define FERRY_CORE_CORES_HPP

#include <sched.h>

namespace ferry {

/// Whether this process may run on at least `num_threads` cores.
inline bool cores_suffice_for(int num_threads) {
  cpu_set_t usable;
  // The call fails if the machine has more processors than fit in the set, which is enough for any node.
  return sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) >= num_threads;
}

}  // namespace ferry

#endif  // FERRY_CORE_CORES_HPP

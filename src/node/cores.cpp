#include "node/cores.hpp"

#include <sched.h>

namespace ferry::node {

bool cores_suffice_for(int num_threads) {
  cpu_set_t usable;
  // More processors than the set has room for are enough for any node.
  return sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) >= num_threads;
}

}  // namespace ferry::node

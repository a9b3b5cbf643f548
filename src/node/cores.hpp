#ifndef FERRY_NODE_CORES_HPP
#define FERRY_NODE_CORES_HPP

namespace ferry::node {

/// Do `num_threads` threads of this host's ranks each find a processor? Counts those that this process may run on
/// (sched_getaffinity(2)). Where not, a thread that looks for something again and again keeps another from bringing it.
bool cores_suffice_for(int num_threads);

}  // namespace ferry::node

#endif  // FERRY_NODE_CORES_HPP

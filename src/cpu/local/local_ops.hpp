#ifndef FERRY_CPU_LOCAL_LOCAL_OPS_HPP
#define FERRY_CPU_LOCAL_LOCAL_OPS_HPP

#include "local/local_ops.hpp"

namespace ferry::cpu {

/// The CPU backend's part of the calls that need no group.
const LocalOps& local_ops();

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LOCAL_LOCAL_OPS_HPP

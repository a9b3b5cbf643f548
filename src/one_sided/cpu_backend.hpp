#ifndef FERRY_ONE_SIDED_CPU_BACKEND_HPP
#define FERRY_ONE_SIDED_CPU_BACKEND_HPP

#include "one_sided/backend.hpp"

namespace ferry::one_sided {

/// Backend of ranks on processors, with the fabric's host heap. Calls take effect at once.
BackendFactory cpu_backend_factory();

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_CPU_BACKEND_HPP

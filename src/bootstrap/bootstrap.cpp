#include "ferry/bootstrap.hpp"

namespace ferry {

Bootstrap::~Bootstrap() = default;

}  // namespace ferry

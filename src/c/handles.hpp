#ifndef FERRY_C_HANDLES_HPP
#define FERRY_C_HANDLES_HPP

/// Contents of the opaque handles.

#include <memory>

#include "ferry/bootstrap.hpp"
#include "ferry/ferry.h"
#include "ferry/group.hpp"
#include "ferry/routing.hpp"

// NOLINTBEGIN(readability-identifier-naming): the names of the C interface

struct ferry_bootstrap {
  std::shared_ptr<ferry::Bootstrap> value;
};

struct ferry_group {
  std::shared_ptr<ferry::Group> value;
};

struct ferry_routing {
  ferry::Routing value;
};

struct ferry_buffer {
  ferry::Buffer value;
};

// NOLINTEND(readability-identifier-naming)

namespace ferry::c {

/// A null handle yields an empty Routing, which every call refuses.
inline Routing routing_of(const ferry_routing* handle) { return handle != nullptr ? handle->value : Routing(); }

}  // namespace ferry::c

#endif  // FERRY_C_HANDLES_HPP

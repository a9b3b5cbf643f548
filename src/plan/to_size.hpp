#ifndef FERRY_PLAN_TO_SIZE_HPP
#define FERRY_PLAN_TO_SIZE_HPP

#include <cstddef>
#include <cstdint>

namespace ferry {

/// Converts a count or index, never negative, to the type of the standard containers.
constexpr std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace ferry

#endif  // FERRY_PLAN_TO_SIZE_HPP

#ifndef FERRY_PLAN_TO_SIZE_HPP
#define FERRY_PLAN_TO_SIZE_HPP

#include <cstddef>
#include <cstdint>

namespace ferry {

/// A count or index, never negative, in the type that the standard containers use.
constexpr std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace ferry

#endif  // FERRY_PLAN_TO_SIZE_HPP

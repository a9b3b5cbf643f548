#ifndef FERRY_CORE_CORRUPT_ROWS_HPP
#define FERRY_CORE_CORRUPT_ROWS_HPP

#include <string_view>

namespace ferry {

/// End of the message of every kDataCorrupt.
inline constexpr std::string_view kCorruptAdvice =
    "memory, a link or a network card has damaged data, or a program wrote over it: look at the error counters of "
    "these "
    "machines, destroy the group on every rank and create a new one";

}  // namespace ferry

#endif  // FERRY_CORE_CORRUPT_ROWS_HPP

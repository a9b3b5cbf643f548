#ifndef FERRY_TESTS_SANITIZERS_HPP
#define FERRY_TESTS_SANITIZERS_HPP

/// Flag of sanitizer builds, for tests that take long or that measure resources a sanitizer changes.

namespace ferry::test {

#if defined(FERRY_SANITIZER_ADDRESS) || defined(FERRY_SANITIZER_THREAD)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace ferry::test

#endif  // FERRY_TESTS_SANITIZERS_HPP

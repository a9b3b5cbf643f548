#ifndef FERRY_TESTS_COUNTED_NEW_HPP
#define FERRY_TESTS_COUNTED_NEW_HPP

/// Count of the bytes that a test program holds through operator new, which covers all heap allocations of the library.
/// Unlike the C library's own count it excludes the allocator's thread caches.

#include <cstddef>

namespace ferry::test {

/// Bytes in blocks of operator new that this process has not deleted; 0 if a sanitizer has its own operator new.
std::size_t new_bytes();

}  // namespace ferry::test

#endif  // FERRY_TESTS_COUNTED_NEW_HPP

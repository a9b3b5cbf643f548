#ifndef FERRY_TESTS_COUNTED_NEW_HPP
#define FERRY_TESTS_COUNTED_NEW_HPP

/// What a program of tests holds through operator new, which is all that the library allocates on the heap. Unlike the
/// C library's own count it leaves out what that allocator caches for its threads.

#include <cstddef>

namespace ferry::test {

/// In blocks of operator new that this process has not deleted; 0 where a sanitizer has its own operator new.
std::size_t new_bytes();

}  // namespace ferry::test

#endif  // FERRY_TESTS_COUNTED_NEW_HPP

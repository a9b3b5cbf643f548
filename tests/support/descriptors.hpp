#ifndef FERRY_TESTS_DESCRIPTORS_HPP
#define FERRY_TESTS_DESCRIPTORS_HPP

namespace ferry::test {

/// Lowers this process's limit so that it can open `count` more file descriptors. For forked processes only: the limit
/// would affect later tests too.
void leave_descriptors(int count);

}  // namespace ferry::test

#endif  // FERRY_TESTS_DESCRIPTORS_HPP

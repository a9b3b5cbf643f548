#include "support/descriptors.hpp"

#include <fcntl.h>
#include <sys/resource.h>

#include <stdexcept>

namespace ferry::test {

void leave_descriptors(int count) {
  int end = 0;
  // The kernel hands out the lowest free number, which must be below the limit.
  for (int num_free = 0;; ++end) {
    if (fcntl(end, F_GETFD) >= 0) continue;
    if (num_free++ == count) break;
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("getrlimit failed");
  limit.rlim_cur = static_cast<rlim_t>(end);
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("setrlimit failed");
}

}  // namespace ferry::test

#ifndef FERRY_NET_UCX_LIMITS_HPP
#define FERRY_NET_UCX_LIMITS_HPP

/// What UCX needs from the system before it starts. It ends the process, or says only "out of memory", where it finds
/// out by itself.

#include <cstddef>
#include <string>

#include "ferry/status.hpp"

namespace ferry::net::ucx {

/// Whether this process may open as many more file descriptors, beside those that are reserved.
/// @errors kSystem: names the limit, what is left and what is needed
Status check_descriptors(std::size_t num_needed);

/// File descriptors that an end of this process will open in its own time, with which no other end may reckon until
/// then. Given back when it is destroyed. From any thread.
class ReservedDescriptors {
 public:
  ReservedDescriptors() = default;
  ReservedDescriptors(const ReservedDescriptors&) = delete;
  ReservedDescriptors& operator=(const ReservedDescriptors&) = delete;
  ~ReservedDescriptors() { give_back(); }

  /// Once, or again after give_back().
  /// @errors as check_descriptors; nothing is reserved then
  Status reserve(std::size_t num_needed);
  void give_back();

 private:
  std::size_t num_reserved_ = 0;
};

/// Descriptors that connections to so many peers need at most: two ends that connect to each other at the same moment
/// have two connections until they notice, and UCX opens some for a moment.
constexpr std::size_t descriptors_of_connections(std::size_t num_peers) { return 2 * num_peers + 4; }

/// Where UCX's posix transport makes its files: UCX_POSIX_DIR, else /dev/shm.
std::string shared_memory_folder();

/// Whether that folder can be written to and has so much room left.
/// @errors kSystem: names the folder, its size, what is left and what is needed
Status check_shared_memory(std::size_t bytes_needed);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_LIMITS_HPP

#ifndef FERRY_NET_UCX_LIMITS_HPP
#define FERRY_NET_UCX_LIMITS_HPP

/// System resources that UCX needs, checked before it starts: without them UCX ends the process, or says only "out of
/// memory".

#include <cstddef>
#include <string>

#include "ferry/status.hpp"

namespace ferry::net::ucx {

/// Checks that this process may open `num_needed` more file descriptors beyond the reserved ones.
/// @errors kSystem: names the limit, the number left and the number needed
Status check_descriptors(std::size_t num_needed);

/// File descriptors that an end of this process will open later and that no other end may count on until then. The
/// destructor returns them. Any thread.
class ReservedDescriptors {
 public:
  ReservedDescriptors() = default;
  ReservedDescriptors(const ReservedDescriptors&) = delete;
  ReservedDescriptors& operator=(const ReservedDescriptors&) = delete;
  ~ReservedDescriptors() { give_back(); }

  /// Call once, or again after give_back().
  /// @errors as check_descriptors; nothing is reserved then
  Status reserve(std::size_t num_needed);
  void give_back();

 private:
  std::size_t num_reserved_ = 0;
};

/// Maximum number of descriptors for connections to `num_peers` peers: two ends that connect to each other at the same
/// moment have two connections until they notice, and UCX opens some for a moment.
constexpr std::size_t descriptors_of_connections(std::size_t num_peers) { return 2 * num_peers + 4; }

/// Checks that a thread can be started, as UCX does.
/// @errors kSystem
Status check_threads();

/// Checks that this process may map `num_bytes` more bytes.
/// @errors kSystem: names the limit and the bytes needed
Status check_address_space(std::size_t num_bytes);

/// Folder of the files of UCX's posix transport: UCX_POSIX_DIR, else /dev/shm.
std::string shared_memory_folder();

/// Checks that the folder is writable and has `bytes_needed` bytes free.
/// @errors kSystem: names the folder, its size, the bytes left and the bytes needed
Status check_shared_memory(std::size_t bytes_needed);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_LIMITS_HPP

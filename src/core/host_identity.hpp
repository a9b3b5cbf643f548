#ifndef FERRY_CORE_HOST_IDENTITY_HPP
#define FERRY_CORE_HOST_IDENTITY_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry {

/// Reads up to `into.size()` bytes of a small file at once, without an allocation that could fail. Returns their
/// number, 0 if there is no such file. Throws std::system_error for want of a descriptor: a rank must not seem to be
/// elsewhere.
std::size_t read_beginning(const char* path, std::span<char> into);

/// Boot id of the running kernel (random(4)): equal only on one machine. All zero if /proc is not mounted.
using BootId = std::array<char, 40>;
BootId read_boot_id();

/// Machine, network and shared memory of the calling thread. Containers may share all of them, or only the machine.
/// Plain bytes, exchanged at creation.
struct HostIdentity {
  BootId boot_id{};
  std::uint64_t network_namespace = 0;  ///< inode
  std::uint64_t shm_device = 0;         ///< device of the file system at /dev/shm; 0 if there is none
  std::uint64_t shm_inode = 0;

  /// Whether both have the same network interfaces, loopback included. False if the machine cannot be identified.
  bool same_network(const HostIdentity& other) const {
    return boot_id[0] != 0 && boot_id == other.boot_id && network_namespace == other.network_namespace;
  }
  /// Whether both have the same interfaces, and find shared memory under the same names.
  bool same_host(const HostIdentity& other) const {
    return same_network(other) && shm_device == other.shm_device && shm_inode == other.shm_inode;
  }
};

HostIdentity this_host();

}  // namespace ferry

#endif  // FERRY_CORE_HOST_IDENTITY_HPP

#ifndef FERRY_TOOLS_DEVICE_DEVICE_FACTS_HPP
#define FERRY_TOOLS_DEVICE_DEVICE_FACTS_HPP

#include <array>
#include <cstdint>

#include "ferry/status.hpp"

namespace ferry::tools {

/// GPU properties recorded with a measurement. Plain bytes: ranks pass them to the process that reports.
struct DeviceFacts {
  std::array<char, 128> name{};        ///< ends with a null character
  std::array<char, 32> pci_address{};  ///< also ends with a null character; "0000:1B:00.0"
  int ordinal = 0;
  int num_devices = 0;
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
  int driver_version = 0;                    ///< newest CUDA that the driver supports, 1000 * major + 10 * minor
  int runtime_version = 0;                   ///< CUDA that this command was built with, in the same form
  bool has_file_descriptor_handles = false;  ///< memory can be passed to other processes as a file descriptor (cuMem)
};

/// Access of one GPU to another's memory.
struct PeerFacts {
  bool has_access = false;
  bool has_native_atomics = false;
  int performance_rank = 0;  ///< reported by the driver: lower is faster
};

/// @errors kUnsupported: no CUDA backend in this build; kCuda
Result<DeviceFacts> read_device_facts(int device);
Result<PeerFacts> read_peer_facts(int device, int peer_device);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_DEVICE_FACTS_HPP

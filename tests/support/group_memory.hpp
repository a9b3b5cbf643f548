#ifndef FERRY_TESTS_GROUP_MEMORY_HPP
#define FERRY_TESTS_GROUP_MEMORY_HPP

/// Differences between backends for the caller of a group: memory of tensors, stream, and time at which errors are
/// reported. Tests written with these functions run on all backends.

#include <cstddef>
#include <vector>

#include "ferry/group.hpp"
#include "support/device_memory.hpp"

namespace ferry::test {

using Bytes = std::vector<std::byte>;

/// Returns true if this group's tensors are in device memory.
inline bool uses_device(const Group& group) { return group.backend() == "cuda"; }
/// Stream for this thread's calls on the group.
Stream stream_of(const Group& group);

/// Backends report an error at once, or when the stream is waited for. This function waits and returns the first of the
/// two, so that no error is pending when the next call begins. `status`: the status that the call returned.
Status finish(Group& group, const Status& status, Stream stream);
inline Status finish(Group& group, const Status& status) { return finish(group, status, stream_of(group)); }

void write_memory(bool on_device, void* to, const void* from, std::size_t num_bytes);
Bytes read_memory(bool on_device, const void* from, std::size_t num_bytes);
void fill_memory(bool on_device, void* to, std::byte value, std::size_t num_bytes);

/// Memory for calls on a group that is not symmetric.
class PlainMemory {
 public:
  PlainMemory() = default;
  PlainMemory(bool on_device, std::size_t num_bytes);
  /// Holds a copy of host memory.
  PlainMemory(bool on_device, const void* from, std::size_t num_bytes);
  template <typename T>
  PlainMemory(bool on_device, const std::vector<T>& values)
      : PlainMemory(on_device, values.data(), values.size() * sizeof(T)) {}

  std::byte* data() { return device_.data() != nullptr ? device_.data() : host_.data(); }

 private:
  Bytes host_;
  DeviceMemory device_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GROUP_MEMORY_HPP

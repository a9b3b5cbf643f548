#include "support/group_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace ferry::test {

Stream stream_of(const Group& group) { return uses_device(group) ? thread_stream() : Stream{}; }

Status finish(Group& group, const Status& status, Stream stream) {
  const Status late = group.wait(stream);
  if (status.ok()) return late;
  // `wait` may repeat the error that the call reported, but may not report a different one.
  if (late.ok() || late.code() == status.code()) return status;
  return Status(ErrorCode::kInternal,
                fmt::format("the call returned {}, then wait returned {}", status.to_string(), late.to_string()));
}

void write_memory(bool on_device, void* to, const void* from, std::size_t num_bytes) {
  if (on_device) {
    copy_to_device(to, from, num_bytes);
  } else if (num_bytes > 0) {
    std::memcpy(to, from, num_bytes);
  }
}

Bytes read_memory(bool on_device, const void* from, std::size_t num_bytes) {
  Bytes bytes(num_bytes);
  if (on_device) {
    copy_from_device(bytes.data(), from, num_bytes);
  } else if (num_bytes > 0) {
    std::memcpy(bytes.data(), from, num_bytes);
  }
  return bytes;
}

void fill_memory(bool on_device, void* to, std::byte value, std::size_t num_bytes) {
  if (on_device) {
    fill_device(to, value, num_bytes);
  } else {
    std::fill_n(static_cast<std::byte*>(to), num_bytes, value);
  }
}

PlainMemory::PlainMemory(bool on_device, std::size_t num_bytes) {
  if (on_device) {
    device_ = DeviceMemory(num_bytes);
  } else {
    host_.resize(num_bytes);
  }
}

PlainMemory::PlainMemory(bool on_device, const void* from, std::size_t num_bytes) : PlainMemory(on_device, num_bytes) {
  write_memory(on_device, data(), from, num_bytes);
}

}  // namespace ferry::test

#include "device/rank_device.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace ferry::tools {

void prepare_ranks_as_threads() {
  static_cast<void>(setenv("CUDA_MODULE_LOADING", "EAGER", 0));
  static_cast<void>(setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));  // the maximum
}

Result<RankDevice> RankDevice::open(std::string_view backend, int rank) {
  RankDevice device;
  if (backend != "cuda") return device;
  auto num_devices = count_devices();
  if (!num_devices) return num_devices.status();
  device.ordinal_ = rank % *num_devices;
  if (Status status = select_device(device.ordinal_); !status) return status;
  auto stream = DeviceStream::create();
  if (!stream) return stream.status();
  // The first kernel of a stream may not begin while others' kernels on the GPU wait for it.
  Status status = delay_stream(stream->get(), 0);
  if (status) status = stream->wait();
  if (!status) return status;
  device.stream_ = std::move(*stream);
  return device;
}

Status RankDevice::copy(void* to, const void* from, std::size_t num_bytes) const {
  if (on_gpu()) return copy_device_bytes(to, from, num_bytes, stream());
  if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  return {};
}

Status RankDevice::fill(void* to, int value, std::size_t num_bytes) const {
  if (!on_gpu()) {
    if (num_bytes > 0) std::memset(to, value, num_bytes);
    return {};
  }
  if (Status status = fill_device_bytes(to, value, num_bytes, stream()); !status) return status;
  return wait();
}

Status MirroredBlock::allocate(const RankDevice& device, Group& group, std::size_t num_bytes) {
  num_bytes_ = num_bytes;
  auto buffer = group.allocate(std::max<std::size_t>(num_bytes, 1));  // not 0, though some ranks receive nothing
  if (!buffer) return buffer.status();
  symmetric_ = std::move(*buffer);
  data_ = static_cast<std::byte*>(symmetric_.data());
  if (device.on_gpu()) copy_ = std::make_unique<std::byte[]>(std::max<std::size_t>(num_bytes, 1));
  host_ = device.on_gpu() ? copy_.get() : data_;
  return {};
}

Status MirroredBlock::mirror(const RankDevice& device, void* host, std::size_t num_bytes) {
  num_bytes_ = num_bytes;
  host_ = static_cast<std::byte*>(host);
  data_ = host_;
  if (!device.on_gpu()) return {};
  auto memory = allocate_device_memory(std::max<std::size_t>(num_bytes, 1));
  if (!memory) return memory.status();
  plain_ = std::move(*memory);
  data_ = plain_.get();
  return to_group(device);
}

Status MirroredBlock::to_group(const RankDevice& device) const {
  return data_ == host_ ? Status() : device.copy(data_, host_, num_bytes_);
}

Status MirroredBlock::to_host(const RankDevice& device) const {
  return data_ == host_ ? Status() : device.copy(host_, data_, num_bytes_);
}

}  // namespace ferry::tools

#ifndef FERRY_TOOLS_DEVICE_RANK_DEVICE_HPP
#define FERRY_TOOLS_DEVICE_RANK_DEVICE_HPP

/// Memory of a rank's tensors: host memory for the backend "cpu", one GPU for "cuda".

#include <cstddef>
#include <optional>
#include <string_view>

#include "device/device_memory.hpp"
#include "ferry/group.hpp"

namespace ferry::tools {

/// Prepares CUDA for a process whose threads are ranks; call it before CUDA is used. If ranks share a GPU, each waits
/// for the others' kernels to run beside its own: loading a kernel at its first use may wait for an idle GPU, and
/// streams that share a connection to the GPU wait for each other. Variables that the user has set are kept.
void prepare_ranks_as_threads();

class RankDevice {
 public:
  /// Selects GPU r modulo their number for rank r of a CUDA group, and makes it current. Call it in the rank's own
  /// process, before anything that ranks create together.
  /// @errors kUnsupported: no GPU; kCuda
  static Result<RankDevice> open(std::string_view backend, int rank);

  bool on_gpu() const { return stream_.has_value(); }
  /// Value for GroupOptions::device.
  int ordinal() const { return ordinal_; }
  /// Stream of all calls; null on the host.
  Stream stream() const { return stream_ ? stream_->get() : Stream{}; }
  /// Blocks until all work on the stream is done; returns at once on the host.
  Status wait() const { return stream_ ? stream_->wait() : Status(); }

  /// Copies from, to or within memory of this rank; returns when done.
  Status copy(void* to, const void* from, std::size_t num_bytes) const;
  Status fill(void* to, int value, std::size_t num_bytes) const;

 private:
  int ordinal_ = kCurrentDevice;
  std::optional<DeviceStream> stream_;
};

/// Memory that a group works on, with a copy in host memory if the host cannot access it (on the host both are the
/// same).
class MirroredBlock {
 public:
  /// Allocates symmetric memory of `group`, zeroed on both sides.
  Status allocate(const RankDevice& device, Group& group, std::size_t num_bytes);
  /// Uses `host` itself if the group can, else a copy of it on the GPU. `host` must outlive this.
  Status mirror(const RankDevice& device, void* host, std::size_t num_bytes);

  /// Memory for the group.
  std::byte* data() const { return data_; }
  /// Memory for the host.
  std::byte* host() const { return host_; }
  Status to_group(const RankDevice& device) const;
  Status to_host(const RankDevice& device) const;

 private:
  Buffer symmetric_;
  DeviceMemory plain_;
  std::unique_ptr<std::byte[]> copy_;
  std::byte* data_ = nullptr;
  std::byte* host_ = nullptr;
  std::size_t num_bytes_ = 0;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_RANK_DEVICE_HPP

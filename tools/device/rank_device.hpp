#ifndef FERRY_TOOLS_DEVICE_RANK_DEVICE_HPP
#define FERRY_TOOLS_DEVICE_RANK_DEVICE_HPP

/// Where a rank's tensors live: in host memory for the backend "cpu", on one GPU for "cuda".

#include <cstddef>
#include <optional>
#include <string_view>

#include "device/device_memory.hpp"
#include "ferry/group.hpp"

namespace ferry::tools {

/// Call it before CUDA is used, in a process whose threads are ranks. They may share a GPU, where each waits for the
/// others' kernels to run beside its own: loading a kernel at its first use may wait for an idle GPU, and streams that
/// share a connection to the GPU wait for each other. What the user has set stays.
void prepare_ranks_as_threads();

class RankDevice {
 public:
  /// Rank r of a CUDA group takes GPU r modulo their number, and makes it current. Call it in the rank's own process,
  /// and before what the ranks make together.
  /// @errors kUnsupported: no GPU; kCuda
  static Result<RankDevice> open(std::string_view backend, int rank);

  bool on_gpu() const { return stream_.has_value(); }
  /// For GroupOptions::device.
  int ordinal() const { return ordinal_; }
  /// The stream of all calls; null on the host.
  Stream stream() const { return stream_ ? stream_->get() : Stream{}; }
  /// Blocks until all that was put on the stream is done; at once on the host.
  Status wait() const { return stream_ ? stream_->wait() : Status(); }

  /// From or to memory of this rank, or between such; returns when done.
  Status copy(void* to, const void* from, std::size_t num_bytes) const;
  Status fill(void* to, int value, std::size_t num_bytes) const;

 private:
  int ordinal_ = kCurrentDevice;
  std::optional<DeviceStream> stream_;
};

/// Memory that a group works on, with a copy in host memory where the host cannot reach it (on the host both are one).
class MirroredBlock {
 public:
  /// Symmetric memory of `group`; zeroed on both sides.
  Status allocate(const RankDevice& device, Group& group, std::size_t num_bytes);
  /// `host` itself where the group can use it, else a copy of it on the GPU. `host` must outlive this.
  Status mirror(const RankDevice& device, void* host, std::size_t num_bytes);

  /// What the group is given.
  std::byte* data() const { return data_; }
  /// What the host reads and writes.
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

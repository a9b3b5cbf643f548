#ifndef FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP
#define FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP

/// cudaFree waits for every GPU of the process and holds the driver's lock meanwhile: where a kernel waits for another
/// rank of this process, that rank could not launch any more. So memory from cudaMalloc rests while the process has a
/// group that may launch such kernels.

namespace ferry::cuda {

/// Held by each group of this process from before its first kernel until after its last.
class LiveGroup {
 public:
  LiveGroup();
  LiveGroup(const LiveGroup&) = delete;
  LiveGroup& operator=(const LiveGroup&) = delete;
  /// Frees what rests, if this was the only one.
  ~LiveGroup();
};

/// cudaFree, as soon as no group is alive. Any thread.
void free_without_groups(int device, void* data);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP

#ifndef FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP
#define FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP

/// cudaFree waits for every GPU of the process and holds the driver's lock meanwhile: if a kernel waited for another
/// rank of this process, that rank could no longer launch. Therefore memory from cudaMalloc is kept while the process
/// has a group that may launch such kernels.
///
/// If other processes have opened the memory (cudaIpcOpenMemHandle), freeing it before they have closed it is undefined
/// (CUDA Runtime API, cudaIpcGetMemHandle), and a rank that is late or was given up on may close it at any time or
/// never. So the memory is also kept until those processes have closed it. The last group of a process to end waits up
/// to a second for that; memory that is still open then is freed when the process creates or ends its next group, or at
/// the latest with the process. That is at most the arena of each group that ended in that way.

#include <memory>
#include <vector>

#include "node/peer_link.hpp"

namespace ferry::cuda {

/// Held by each group of this process from before its first kernel until after its last.
class LiveGroup {
 public:
  LiveGroup();
  LiveGroup(const LiveGroup&) = delete;
  LiveGroup& operator=(const LiveGroup&) = delete;
  /// If this was the only one, frees the kept memory; waits up to a second for importers.
  ~LiveGroup();
};

/// Links to the processes that open a block of memory; a link closes when its process has closed the memory.
using Importers = std::vector<std::unique_ptr<node::PeerLink>>;

/// Calls cudaFree as soon as no group is alive and all importers have closed the memory. Any thread.
void free_without_groups(int device, void* data, Importers importers);

/// Number of blocks of memory that are kept now.
std::size_t num_resting_blocks();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP

#ifndef FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP
#define FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP

/// cudaFree waits for every GPU of the process and holds the driver's lock meanwhile: where a kernel waits for another
/// rank of this process, that rank could not launch any more. So memory from cudaMalloc rests while the process has a
/// group that may launch such kernels.
///
/// Where other processes have opened the memory (cudaIpcOpenMemHandle), freeing it before they have closed it is
/// undefined (CUDA Runtime API, cudaIpcGetMemHandle), and a rank that is late or was given up on may close it at any
/// time or never. So it also rests until those processes have let go of it. The last group of a process to end waits a
/// second for that; what is still open then is freed when the process creates or ends its next group, at the latest
/// with the process. That is at most the arena of each group which ended in that way.

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
  /// Frees what rests, if this was the only one; waits up to a second for importers.
  ~LiveGroup();
};

/// Links to the processes that open a block of memory; each is gone when its process has closed the memory.
using Importers = std::vector<std::unique_ptr<node::PeerLink>>;

/// cudaFree, as soon as no group is alive and all importers are gone. Any thread.
void free_without_groups(int device, void* data, Importers importers);

/// Blocks of memory that rest now.
std::size_t num_resting_blocks();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_DEFERRED_FREE_HPP

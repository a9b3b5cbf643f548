#ifndef FERRY_CALL_KERNEL_RINGS_HPP
#define FERRY_CALL_KERNEL_RINGS_HPP

/// Rings of ranks whose kernels use them: in host memory, or in GPU memory that network cards reach. Where
/// GroupOptions::ring_memory is "auto" and every rank proposes it, ranks connect with rings in GPU memory, and whether
/// each card reaches each GPU decides: where any rank cannot, all connect again with rings in host memory.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "call/group_state.hpp"
#include "core/backend_context.hpp"
#include "core/rank_place.hpp"
#include "rail/rails.hpp"
#include "rail/ring_memory.hpp"

namespace ferry::call {

/// Rings of a rank whose kernels use them too; ranks without kernels use the default.
struct KernelRings {
  rail::RingShape shape;
  // See RailsOptions.
  std::span<std::byte> memory{};
  net::RingWords* words = nullptr;
  /// `memory` is GPU memory for chunks only (RailsOptions::GpuRings); the hosts' rings, of the default shape, are in
  /// `host_memory`, and kernels send call headers through them.
  bool in_gpu = false;
  std::span<std::byte> host_memory{};
  net::RingWords* host_words = nullptr;
  bool read_back_writes = false;
  Status status{};  ///< reason why there are no rings
};

/// Makes a rank's rings.
struct KernelRingsSource {
  rail::GpuSide gpu{};
  /// Makes rings in GPU memory or in host memory, of one shape on all ranks. Frees those that it made before, which no
  /// network uses any more.
  std::function<KernelRings(bool in_gpu)> make{};
};

/// Has the rails use these rings; returns their status.
Status add_rings(const KernelRings& rings, const KernelRingsSource& source, rail::RailsOptions& options);

struct GpuRingsAttempt {
  std::unique_ptr<rail::Rails> rails{};  ///< connected; null: a rank cannot have its rings in GPU memory
  std::string why_not{};                 ///< in one clause that names the rank
};

/// Longest wait until peers' cards have reached this rank's GPU: a quarter of the group's deadline, so that enough of a
/// launcher's patience is left for host memory, and at most ten seconds.
std::int64_t longest_attempt_ns(std::int64_t timeout_ns);

/// Collective, like CallSync::create: connects with rings in GPU memory, on all ranks or on none. Lasts as long as
/// longest_attempt_ns at most. With an error in `my_status` no rank connects so.
/// @errors the creation has failed, whatever the memory
Result<GpuRingsAttempt> attempt_gpu_rings(const BackendContext& context, const KernelRingsSource& source,
                                          const std::vector<RankPlace>& places, GroupState& state,
                                          const Status& my_status);

}  // namespace ferry::call

#endif  // FERRY_CALL_KERNEL_RINGS_HPP

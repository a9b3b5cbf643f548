#ifndef FERRY_CUDA_LATENCY_MASK_HPP
#define FERRY_CUDA_LATENCY_MASK_HPP

/// Groups that go on without lost ranks (GroupOptions::mask_lost_ranks).
///
/// Blocks of a half divide a call by what ranks send, so all blocks must find the same ranks masked, and none may wait
/// for a rank that does not come. Therefore a kernel of its own, a *gate*, waits before each half: before a send half
/// for the sets that ranks grant, before a receive half for all that ranks send. A gate masks ranks that do not come.
/// It writes the words that the half reads (grants, headers, counts, done words) to `shadow`, which no other rank
/// writes, so late words of a masked rank have no effect; a masked rank appears there without a set and without tokens.
/// The halves are the same code as in other groups, in kernels of their own (template parameter kMasks), whose blocks
///
///   - read the shadow, by other offsets in their copy of LatencyLayout;
///   - send what a masked rank would get to `nowhere`, by another address in their copy of RankParams.
///
/// Whole calls are made as halves.
///
/// One race remains: a rank that is masked while one of its send halves runs, and that stands still for the whole
/// deadline (another process holds the GPU, a debugger), may store rows of a combine that others take for rows of a
/// later one. Halves that begin later see that the rank is masked.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/latency/params.hpp"
#include "plan/carver.hpp"

namespace ferry::cuda {

/// Deadlines for which a rank that beats is waited for: more than ranks wait for each other in a row (as in
/// call/silence_watch.hpp, where ranks see more of each other).
inline constexpr std::uint64_t kPatience = 4;

/// This rank's own state, device scope.
struct MaskState {
  std::uint32_t masked[kMaxRanks];  ///< 1: this rank masks that one
  std::uint64_t last_beat_ns;       ///< time at which this rank last showed that it waits
  SentCall refused[kLatencyKinds];  ///< the call that this rank refuses
};

/// Trivial, so that kernels take it by value.
struct MaskParams {
  MaskState* state = nullptr;
  std::byte* shadow = nullptr;   ///< copy of LatencyControl
  std::byte* nowhere = nullptr;  ///< copy of the first unset_bytes() of LatencyControl
  std::uint64_t timeout_ns = 0;  ///< GroupOptions::mask_timeout_ns

  /// Whether the group masks ranks.
  constexpr bool present() const { return state != nullptr; }

  /// Parts of `base`, which is zeroed; `size_bytes` becomes their size.
  static constexpr MaskParams at(std::byte* base, std::size_t num_ranks, std::size_t& size_bytes) {
    const LatencyControl control = LatencyControl::of(num_ranks);
    plan::Carver carver(base);
    MaskParams mask;
    mask.state = carver.take<MaskState>(1);
    mask.shadow = carver.take<std::byte>(static_cast<std::size_t>(control.size_bytes));
    mask.nowhere = carver.take<std::byte>(static_cast<std::size_t>(control.unset_bytes()));
    size_bytes = carver.used_bytes();
    return mask;
  }
};

/// Parameters of a half, or of a refusal, in a group that masks ranks.
template <typename Half>
struct Masked : Half {
  MaskParams mask;
};

/// Parameters of a half, with or without masks.
template <typename Half, bool kMasks>
using HalfParams = std::conditional_t<kMasks, Masked<Half>, Half>;

/// Parameters of a kernel that makes either half of a call (kernels.hpp says why one kernel makes both).
template <typename Send, typename Receive>
struct EitherHalf {
  explicit EitherHalf(const Send& half) : send(half) {}
  explicit EitherHalf(const Receive& half) : receive(half), receives(true) {}

  union {
    Send send;
    Receive receive;
  };
  bool receives = false;
};

struct MaskGateParams {
  LatencyParams call;
  MaskParams mask;
  LatencyKind kind = LatencyKind::kDispatch;
  PlacementTables placement;  ///< only for a dispatch
  bool refuses = false;       ///< the call is MaskState::refused, not that of the tables
};
/// Masks ranks, or ends their masks. One block.
struct MaskUpdateParams {
  LatencyParams call;
  MaskParams mask;
  int first_rank = 0;
  int end_rank = 0;  ///< this rank itself is skipped
  bool masked = false;
};

struct MaskQueryParams {
  MaskParams mask;
  int num_ranks = 0;
  std::int32_t* out = nullptr;  ///< [R]
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_MASK_HPP

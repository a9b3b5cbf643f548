#ifndef FERRY_CUDA_LATENCY_MASK_HPP
#define FERRY_CUDA_LATENCY_MASK_HPP

/// Groups that go on without lost ranks (GroupOptions::mask_lost_ranks).
///
/// Blocks of a half divide a call by what ranks say, so all must find the same ranks masked, and none may wait for one
/// that does not come. So kernels of their own wait before each half, a *gate*: for the sets that ranks grant before a
/// send half, for all that ranks send before a receive half. A rank that does not come is masked there. What the halves
/// look for gates write where only this rank writes, so that no late word of a masked rank matters: grants, headers,
/// counts and done words in `shadow`, those of a masked rank as if it had no set and no tokens. The halves are the same
/// as in other groups, in kernels of their own that
///   - look there, by other offsets in their copy of LatencyLayout;
///   - send what a masked rank would get to `nowhere`, by another address in their copy of RankParams.
/// Whole calls are made as halves.
///
/// What is left to chance: a rank that is masked while one of its send halves runs, but stands still for the whole
/// deadline (another process holds the GPU, a debugger), may store rows of a combine that others take for those of a
/// later one. Halves that begin later see that they are masked.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/latency/params.hpp"
#include "plan/carver.hpp"

namespace ferry::cuda {

/// Deadlines that a rank is waited for that beats: more than ranks wait for each other in a row (call/silence_watch.hpp
/// does the same, where ranks see more of each other).
inline constexpr std::uint64_t kPatience = 4;

/// This rank's own, device scope.
struct MaskState {
  std::uint32_t masked[kMaxRanks];  ///< 1: this rank masks that one
  std::uint64_t last_beat_ns;       ///< when this rank has last shown that it waits
  SentCall refused[kLatencyKinds];  ///< the call that this rank refuses
};

/// Trivial, so that kernels take it by value.
struct MaskParams {
  MaskState* state = nullptr;
  std::byte* shadow = nullptr;   ///< of LatencyControl
  std::byte* nowhere = nullptr;  ///< of LatencyControl, its first unset_bytes()
  std::uint64_t timeout_ns = 0;  ///< GroupOptions::mask_timeout_ns

  /// Whether the group masks ranks.
  constexpr bool present() const { return state != nullptr; }

  /// Parts of `base`, zeroed; `size_bytes` is what they take.
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

/// A half, or a refusal, in a group that masks ranks.
template <typename Half>
struct Masked : Half {
  MaskParams mask;
};

/// Parameters of a kernel that makes a half, in groups that mask ranks or not.
template <typename Half, bool kMasks>
using HalfParams = std::conditional_t<kMasks, Masked<Half>, Half>;

struct MaskGateParams {
  LatencyParams call;
  MaskParams mask;
  LatencyKind kind = LatencyKind::kDispatch;
  PlacementTables placement;  ///< dispatch
  bool refuses = false;       ///< the call is MaskState::refused
};
/// Masks ranks, or not any more. One block.
struct MaskUpdateParams {
  LatencyParams call;
  MaskParams mask;
  int first_rank = 0;
  int end_rank = 0;  ///< this rank itself is left out
  bool masked = false;
};

struct MaskQueryParams {
  MaskParams mask;
  int num_ranks = 0;
  std::int32_t* out = nullptr;  ///< [R]
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_MASK_HPP

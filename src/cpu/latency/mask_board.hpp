#ifndef FERRY_CPU_LATENCY_MASK_BOARD_HPP
#define FERRY_CPU_LATENCY_MASK_BOARD_HPP

/// Board of each rank's masks, which all ranks can read.
///
///   field            writer  readers  order              publishes
///   since[r]         owner   rank r   release / acquire  the first call that the owner makes without rank r; 0: the
///                                                        owner does not mask r. Written before the owner continues
///                                                        without r, so before it overwrites anything that r may still
///                                                        read
///
/// Therefore values that a rank has read from a peer in a call are valid if the peer still does not mask the rank in
/// that call afterwards.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "node/peers.hpp"

namespace ferry::cpu {

class MaskBoard {
 public:
  /// Must be the first allocation from every rank's arena, so that the offset is the same in all.
  static Result<std::unique_ptr<MaskBoard>> create(node::Peers& peers);

  /// Bytes of the arena that the board takes.
  std::size_t size_bytes() const;

  /// Whether this rank masks `rank`.
  bool masks(int rank) const { return since(peers_->rank(), rank).load(std::memory_order_relaxed) != 0; }
  /// This rank makes its calls without `rank` from `call` on. Without effect if `rank` is masked already.
  void mask(int rank, std::uint64_t call);
  void unmask(int rank);
  /// Whether `rank` makes `call` without this one.
  bool masks_this_rank(int rank, std::uint64_t call) const;

 private:
  MaskBoard(node::Peers& peers, std::size_t offset) : peers_(&peers), offset_(offset) {}
  std::atomic<std::uint64_t>& since(int owner, int rank) const;

  node::Peers* peers_;
  std::size_t offset_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LATENCY_MASK_BOARD_HPP

#ifndef FERRY_CPU_LATENCY_SURVIVORS_HPP
#define FERRY_CPU_LATENCY_SURVIVORS_HPP

/// Calls of one node without the ranks that this rank masks: the counterpart of CallSync. A wait masks ranks that do
/// not arrive, and continues; a rank also masks every rank by which it finds itself masked. In groups that do not mask
/// lost ranks only absent ones are masked, from the start, and a wait for any other that does not arrive breaks the
/// group.
///
/// A rank is masked when it is found lost and a further poll of its flags does not find its part; when it has shown no
/// sign for mask_timeout_ns (ranks that wait beat, as in call/silence_watch.hpp); and in any case after twice that
/// time.

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "call/call_sync.hpp"
#include "cpu/latency/mask_board.hpp"

namespace ferry::cpu {

class Survivors {
 public:
  /// `sync` and `board` must outlive it. `mask_timeout_ns`: 0 in groups that do not mask lost ranks.
  Survivors(call::CallSync& sync, MaskBoard& board, std::int64_t mask_timeout_ns);

  bool masks_lost_ranks() const { return timeout_ns_ != 0; }

  /// Starts a call, as CallSync::begin, with the ranks that are not masked.
  Status begin(const node::CallDescriptor& descriptor);
  /// Whether a rank takes part in the current call; this rank itself does.
  bool include(int rank) const { return rank == sync_.rank() || !board_.masks(rank); }
  /// Descriptor that an included rank passed to begin.
  const node::CallDescriptor& descriptor_of(int rank) const { return descriptors_[static_cast<std::size_t>(rank)]; }
  /// Masks ranks that make the current call without this one. Returns whether there was one; if not, all values that
  /// this rank has read from the others are valid.
  bool drop_deserters();
  /// Ends a call: waits until no rank reads this rank's memory any more. Without masks an error also says that this
  /// rank's own reads may be wrong.
  Status finish();

  /// Masks `rank`, or ends its mask, from the next call on.
  void update(int rank, bool masked);
  void query(std::int32_t* out) const;
  /// Whether this rank masks `rank`, which does not mask it.
  bool is_silent(int rank) const { return !include(rank) && !board_.masks_this_rank(rank, call() + 1); }

 private:
  struct Sign {
    std::uint64_t beats = 0;
    std::int64_t since_ns = 0;
    bool was_lost = false;
  };
  void wait(node::Phase phase);
  /// Masks the missing ranks that are not worth waiting for. Returns whether to look at the flags again at once.
  bool give_up_on_lost(std::int64_t waited_ns, bool look_for_dead);
  std::uint64_t call() const { return sync_.peers().call(); }

  call::CallSync& sync_;
  MaskBoard& board_;
  std::int64_t timeout_ns_;
  std::vector<node::CallDescriptor> descriptors_;  // by rank
  std::vector<Sign> signs_;                        // by rank, of one wait
  std::vector<int> missing_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LATENCY_SURVIVORS_HPP

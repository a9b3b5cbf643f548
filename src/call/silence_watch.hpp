#ifndef FERRY_CALL_SILENCE_WATCH_HPP
#define FERRY_CALL_SILENCE_WATCH_HPP

/// Which rank is to blame for a wait that lasts too long.
///
/// If a rank stops, those that need it wait for it, others wait for those, and so on. To blame is the rank at the end
/// of such a chain: the one that is waited for and does not itself wait. No rank sees a whole chain, and none has to:
///
///   - While it waits, a rank beats: every interval_ns() it raises a number that the ranks of its node (in its control
///     block) and of its rail (as a notification) can see. Others never wait for it directly. It does not beat outside
///     waits, so it is *silent* when it is stopped, dead, computing or not calling.
///   - A rank whose deadline has passed blames a rank that it misses and that has been silent for most of the deadline.
///     It tells the ranks of its node and of its rail, and each rank that takes over the verdict tells its own. A rank
///     that knows a verdict gives none.
///   - A rank that misses only ranks that beat is not at the end of a chain. It waits for the verdict of a rank that
///     is, at most until twice the deadline.
///
/// All ranks are silent to a rank that was itself stopped or got no core. So time counts only as it passes between two
/// calls of due(), and no longer than kLongestStep at once: such a rank sees the others beat before it blames one.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry::call {

/// What a waiting rank shows to those that may wait for it. Either number only shows that it is not the one seen
/// before.
struct Sign {
  std::uint64_t beats = 0;
  std::uint64_t progress = 0;  ///< work done inside calls
  bool operator==(const Sign&) const = default;
};

class SilenceWatch {
 public:
  /// The watch of one rank in a group of `num_ranks`.
  SilenceWatch(int num_ranks, std::int64_t timeout_ns)
      : timeout_ns_(timeout_ns), seen_(static_cast<std::size_t>(num_ranks)) {}

  /// Longest time between two beats of a waiting rank, and between two observations of it.
  std::int64_t interval_ns() const { return timeout_ns_ / kBeatsPerDeadline; }

  /// The deadline starts now: this rank begins to wait, or has done something.
  void restart(std::int64_t now_ns) {
    ++round_;
    last_ns_ = now_ns;
    clock_ns_ = 0;
    begin_ns_ = 0;
    next_ns_ = interval_ns();
  }

  /// Whether observe() is due. To be called often while the rank waits.
  bool due(std::int64_t now_ns) {
    clock_ns_ += std::min(now_ns - last_ns_, timeout_ns_ / kLongestStep);
    last_ns_ = now_ns;
    return clock_ns_ >= next_ns_;
  }
  /// From the last due() until the next observation.
  std::int64_t due_in_ns() const { return std::max<std::int64_t>(next_ns_ - clock_ns_, 0); }

  struct Verdict {
    int culprit = -1;       ///< -1: wait on
    bool is_silent = true;  ///< false: it waits itself, as do all others that are missing
  };
  /// Looks at the missing ranks: `sign_of(rank)` is what a rank shows now. A missing rank's progress restarts the
  /// deadline.
  template <typename SignOf>
  Verdict observe(std::span<const int> missing, SignOf&& sign_of) {
    int culprit = -1;
    std::int64_t longest_ns = -1;
    for (const int rank : missing) {
      const std::int64_t silent_ns = silence_of(rank, sign_of(rank));
      // Several that never showed anything have been silent for the same time: all observers take the lowest.
      if (silent_ns < longest_ns || (silent_ns == longest_ns && rank > culprit)) continue;
      longest_ns = silent_ns;
      culprit = rank;
    }
    const std::int64_t waited_ns = clock_ns_ - begin_ns_;
    const std::int64_t left_ns = timeout_ns_ - waited_ns;
    next_ns_ = clock_ns_ + (left_ns > 0 ? std::min(left_ns, interval_ns()) : interval_ns());
    const bool is_silent = longest_ns >= timeout_ns_ / kSilence.denominator * kSilence.numerator;
    if (left_ns > 0 || (!is_silent && waited_ns < kPatience * timeout_ns_)) return {};
    return {culprit, is_silent};
  }

 private:
  struct Seen {
    std::uint64_t round = 0;  ///< of the watch; what was seen in an earlier one does not count
    Sign sign;
    std::int64_t since_ns = 0;
    bool has_changed = false;  ///< in this round
  };
  struct Fraction {
    std::int64_t numerator;
    std::int64_t denominator;
  };
  /// Few enough to cost nothing, enough that a rank must miss a dozen in a row before it counts as silent.
  static constexpr std::int64_t kBeatsPerDeadline = 16;
  /// Of the deadline. A rank that stopped when its peer began to wait has been silent for 15/16 of it at the deadline,
  /// as that peer sees it; a waiting rank for 1/16 and as long as it gets no core.
  static constexpr Fraction kSilence{3, 4};
  /// Deadlines until a rank stops waiting for the verdict of another.
  static constexpr std::int64_t kPatience = 2;
  /// Part of the deadline. A rank that continues after a stop has a third of one to hear from the others.
  static constexpr std::int64_t kLongestStep = 4;

  std::int64_t silence_of(int rank, const Sign& sign) {
    Seen& seen = seen_[static_cast<std::size_t>(rank)];
    if (seen.round != round_) {
      seen = {round_, sign, clock_ns_, false};
    } else if (seen.sign != sign) {
      // A rank of another node shows its progress together with beats: the first may tell of work before this wait.
      if (seen.has_changed && seen.sign.progress != sign.progress) begin_ns_ = clock_ns_;
      seen = {round_, sign, clock_ns_, true};
    }
    return clock_ns_ - seen.since_ns;
  }

  std::int64_t timeout_ns_;
  std::vector<Seen> seen_;  // by rank
  std::uint64_t round_ = 0;
  std::int64_t last_ns_ = 0;   // of the system's clock
  std::int64_t clock_ns_ = 0;  // this watch's own, as are the next two
  std::int64_t begin_ns_ = 0;
  std::int64_t next_ns_ = 0;
};

}  // namespace ferry::call

#endif  // FERRY_CALL_SILENCE_WATCH_HPP

#ifndef FERRY_CALL_SILENCE_WATCH_HPP
#define FERRY_CALL_SILENCE_WATCH_HPP

/// Verdict on the rank at fault for a wait that lasts too long.
///
/// If a rank stops, the ranks that need it wait for it, others wait for those, and so on. At fault is the rank at the
/// end of such a chain: others wait for it and it does not wait itself. No rank sees a whole chain, and none has to:
///
///   - While it waits, a rank beats: every interval_ns() it raises a number that the ranks of its node (in its control
///     block) and of its rail (as a notification) can see. Ranks outside both never wait for it directly. It does not
///     beat outside waits, so it is *silent* when it is stopped, dead, computing or not calling.
///   - A rank whose deadline has passed blames a missing rank that has been silent for most of the deadline. It reports
///     its verdict to the ranks of its node and of its rail, and each rank that adopts the verdict passes it on in the
///     same way. A rank that has a verdict makes none.
///   - A rank for which only beating ranks are missing is not at the end of a chain. It waits for the verdict of a rank
///     that is, at most until twice the deadline.
///
/// To a rank that was itself stopped or got no core, all ranks seem silent. So time counts only between two calls of
/// due(), and no more than 1/kLongestStep of the deadline at once: such a rank sees the others beat before it blames
/// one.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry::call {

/// Numbers that a waiting rank shows to ranks that may wait for it. Only a change of either number has a meaning.
struct Sign {
  std::uint64_t beats = 0;
  std::uint64_t progress = 0;  ///< work done inside calls
  bool operator==(const Sign&) const = default;
};

class SilenceWatch {
 public:
  /// Watch of one rank in a group of `num_ranks`.
  SilenceWatch(int num_ranks, std::int64_t timeout_ns)
      : timeout_ns_(timeout_ns), seen_(static_cast<std::size_t>(num_ranks)) {}

  /// Longest time between two beats of a waiting rank, and between two observations of the others.
  std::int64_t interval_ns() const { return timeout_ns_ / kBeatsPerDeadline; }

  /// Starts the deadline: this rank begins to wait, or has made progress.
  void restart(std::int64_t now_ns) {
    ++round_;
    last_ns_ = now_ns;
    clock_ns_ = 0;
    begin_ns_ = 0;
    next_ns_ = interval_ns();
  }

  /// Whether observe() is due. Called often while the rank waits.
  bool due(std::int64_t now_ns) {
    clock_ns_ += std::min(now_ns - last_ns_, timeout_ns_ / kLongestStep);
    last_ns_ = now_ns;
    return clock_ns_ >= next_ns_;
  }
  /// Time from the last due() until the next observation.
  std::int64_t due_in_ns() const { return std::max<std::int64_t>(next_ns_ - clock_ns_, 0); }

  struct Verdict {
    int culprit = -1;       ///< -1: continue to wait
    bool is_silent = true;  ///< false: it waits itself, like all other missing ranks
  };
  /// Observes the missing ranks: `sign_of(rank)` is a rank's sign now. A missing rank's progress restarts the deadline.
  template <typename SignOf>
  Verdict observe(std::span<const int> missing, SignOf&& sign_of) {
    int culprit = -1;
    std::int64_t longest_ns = -1;
    for (const int rank : missing) {
      const std::int64_t silent_ns = silence_of(rank, sign_of(rank));
      // Ranks that never changed their sign have been silent for equally long: all observers blame the lowest.
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
    std::uint64_t round = 0;  ///< round of the watch; signs seen in an earlier round do not count
    Sign sign;
    std::int64_t since_ns = 0;
    bool has_changed = false;  ///< in this round
  };
  struct Fraction {
    std::int64_t numerator;
    std::int64_t denominator;
  };
  /// Few enough to cost nothing, and enough that a rank counts as silent only after a dozen missed beats.
  static constexpr std::int64_t kBeatsPerDeadline = 16;
  /// Part of the deadline after which a rank counts as silent. A rank that stopped when its peer began to wait has been
  /// silent for 15/16 of the deadline in that peer's view; a waiting rank for 1/16 plus the time in which it gets no
  /// core.
  static constexpr Fraction kSilence{3, 4};
  /// Deadlines until a rank stops waiting for the verdict of another.
  static constexpr std::int64_t kPatience = 2;
  /// Divisor of the deadline. A rank that continues after a stop has a third of a deadline to notice the others' beats.
  static constexpr std::int64_t kLongestStep = 4;

  std::int64_t silence_of(int rank, const Sign& sign) {
    Seen& seen = seen_[static_cast<std::size_t>(rank)];
    if (seen.round != round_) {
      seen = {round_, sign, clock_ns_, false};
    } else if (seen.sign != sign) {
      // A rank of another node shows its progress together with beats: its first change may show work from before this
      // wait.
      if (seen.has_changed && seen.sign.progress != sign.progress) begin_ns_ = clock_ns_;
      seen = {round_, sign, clock_ns_, true};
    }
    return clock_ns_ - seen.since_ns;
  }

  std::int64_t timeout_ns_;
  std::vector<Seen> seen_;  // by rank
  std::uint64_t round_ = 0;
  std::int64_t last_ns_ = 0;   // on the system's clock
  std::int64_t clock_ns_ = 0;  // on this watch's own clock, as are the next two
  std::int64_t begin_ns_ = 0;
  std::int64_t next_ns_ = 0;
};

}  // namespace ferry::call

#endif  // FERRY_CALL_SILENCE_WATCH_HPP

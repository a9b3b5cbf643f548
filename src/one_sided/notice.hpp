#ifndef FERRY_ONE_SIDED_NOTICE_HPP
#define FERRY_ONE_SIDED_NOTICE_HPP

/// Record by which a rank tells the others how far it is in the meetings of its teams, and why it gave one up. A rank
/// writes its own; ranks of its node read it there, ranks of other nodes have a copy in their own memory, to which the
/// rank sends what changes: while it waits long, when it gives up, and when it leaves (Fabric).

#include <array>
#include <cstddef>
#include <cstdint>

#include "node/futex.hpp"
#include "one_sided/control.hpp"

namespace ferry::one_sided {

/// Reason for which a rank cannot take part in a meeting any more.
enum class Fault : std::uint8_t {
  kNone = 0,
  kLeft = 1,
  kDied = 2,
  kGone = 3,    ///< the network reports that its process ended or closed the connection
  kCut = 4,     ///< the network to it failed
  kLate = 5,    ///< it did not respond until a deadline; the only reason that may pass
  kGaveUp = 6,  ///< it gave up, like others, as this rank was found lost; in no notice
};

/// A rank at fault.
struct Finding {
  int rank = -1;
  Fault fault = Fault::kNone;
};

/// A finding and the meeting that it ended, in one word: number, fault, rank + 1. 0: there is none.
struct Verdict {
  std::uint64_t number = 0;
  Finding finding{};

  static constexpr int kRankBits = 16;
  static constexpr int kFaultBits = 8;

  std::uint64_t word() const {
    return (number << kFaultBits | static_cast<std::uint64_t>(finding.fault)) << kRankBits |
           static_cast<std::uint64_t>(finding.rank + 1);
  }
  static Verdict of(std::uint64_t word) {
    const std::uint64_t fault = (word >> kRankBits) & 0xFF;
    return {.number = word >> (kRankBits + kFaultBits),
            .finding = {.rank = static_cast<int>(word & 0xFFFF) - 1, .fault = static_cast<Fault>(fault)}};
  }
};

/// Statement of a rank that it waits in a meeting, in one word: number, count, slot, awaited rank + 1. 0: it waits in
/// none.
struct Announcement {
  std::uint64_t number = 0;  ///< modulo 2^32
  std::uint64_t count = 0;   ///< of this rank's announcements, modulo 2^8: tells repeated ones apart
  int slot = 0;              ///< of the team, as the waiting rank has it
  int awaited = -1;          ///< -1: none by name

  std::uint64_t word() const {
    return number << 32 | (count & 0xFF) << 24 | static_cast<std::uint64_t>(slot) << 16 |
           static_cast<std::uint64_t>(awaited + 1);
  }
  static Announcement of(std::uint64_t word) {
    return {.number = word >> 32,
            .count = (word >> 24) & 0xFF,
            .slot = static_cast<int>((word >> 16) & 0xFF),
            .awaited = static_cast<int>(word & 0xFFFF) - 1};
  }
};
static_assert(kNumTeams <= 0x100);

/// Words of the control area, which are zero at first. All but the first are sent when the rank leaves.
struct alignas(node::kFlagAlignment) Notice {
  std::uint64_t waiting = 0;  ///< Announcement
  std::uint64_t finding = 0;  ///< Verdict without a number: the first rank that this one found lost
  std::uint64_t departed = 0;
  std::array<std::uint64_t, kNumTeams> met{};       ///< by slot: number of the last meeting that this rank is through
  std::array<std::uint64_t, kNumTeams> given_up{};  ///< Verdict, by slot: on the last meeting that this rank gave up
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_NOTICE_HPP

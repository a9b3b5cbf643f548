#ifndef FERRY_TESTS_MEMBER_PROCESS_HPP
#define FERRY_TESTS_MEMBER_PROCESS_HPP

/// Programs that membership_rounds.py starts, stops and kills: their arguments, their events (a JSON object a line on
/// standard output), and how they become members.
///
///   PROGRAM --create RANK NUM_RANKS PORT | --join ID CONTACT[,CONTACT…]
///           --first-ranks N --deadline-ms N --patience-ms N --ranks-per-node N [--backend NAME]
///           [--look-every STEPS] [--unmasked]
///
/// FERRY_SECRET: the secret. They end when a line comes on standard input, in the same step as all others.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"

namespace ferry::test {

struct MemberSettings {
  int create_rank = -1;
  int num_ranks = 0;
  std::uint16_t port = 0;
  int join_id = -1;
  std::vector<std::string> contacts{};
  std::int64_t deadline_ns = 0;  ///< of a group's waits
  std::int64_t patience_ns = 0;  ///< MembershipOptions::timeout_ns
  int ranks_per_node = 0;
  int num_first_ranks = 0;  ///< members of the first view, whose experts there are
  std::string backend = "cpu";
  std::uint64_t num_steps_between_views = 20;  ///< calls of next_view in which all only look for others that wait
  bool masks = true;                           ///< in programs that keep a group: it masks lost ranks

  /// The number that this process has.
  int id() const { return create_rank < 0 ? join_id : create_rank; }
};

/// The groups and steps of a member. A loss is kPeerLost, kTimeout or kTransport; any other error ends the program.
class MemberWork {
 public:
  virtual ~MemberWork() = default;
  /// Makes the group of the members' view.
  virtual Status form_group(Membership& members) = 0;
  virtual Status make_step(const MembershipView& view, std::uint64_t step) = 0;
  /// Answers a loss in one of these, which was `status`, by what next_view is told.
  virtual NextViewOptions take_loss(const Status& status) = 0;
};

/// Reads the arguments, becomes a member, and makes steps until it is told to end or is left out. `make_work` is called
/// once.
int run_member(std::span<char*> arguments,
               const std::function<std::unique_ptr<MemberWork>(const MemberSettings&)>& make_work);

}  // namespace ferry::test

#endif  // FERRY_TESTS_MEMBER_PROCESS_HPP

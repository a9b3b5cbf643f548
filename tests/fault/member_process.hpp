#ifndef FERRY_TESTS_MEMBER_PROCESS_HPP
#define FERRY_TESTS_MEMBER_PROCESS_HPP

/// Programs that membership_rounds.py starts, stops and kills: their arguments, their events (a JSON object a line on
/// standard output), and how they become members.
///
///   PROGRAM --create RANK NUM_RANKS PORT | --join ID CONTACT[,CONTACT…]
///           --first-ranks N --deadline-ms N --patience-ms N --ranks-per-node N [--backend NAME]
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

  /// The number that this process has.
  int id() const { return create_rank < 0 ? join_id : create_rank; }
};

void print_event(const char* name, const std::string& fields = {});
/// Prints the view of these members, as the first one of a process or as a new one.
void print_view(const Membership& members);
/// A status as fields of an event.
std::string text_of(const Status& status);

bool is_told_to_end();

/// Reads the arguments, becomes a member, and runs `body`, whose result is the exit code.
int run_member(std::span<char*> arguments,
               const std::function<int(const MemberSettings&, std::shared_ptr<Membership>)>& body);

}  // namespace ferry::test

#endif  // FERRY_TESTS_MEMBER_PROCESS_HPP

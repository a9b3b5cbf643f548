#ifndef FERRY_MEMBERSHIP_MESSAGES_HPP
#define FERRY_MEMBERSHIP_MESSAGES_HPP

/// Frames between members, and between a process that joins and the member that it asks: little-endian, without
/// padding. Every one begins with its kind and the view of its sender, so that members which are a view behind learn
/// the latest one.
///
/// | kind            | content after the view                                                          |
/// |-----------------|---------------------------------------------------------------------------------|
/// | report          | steps (u64), leaves (u32), accused ids, joiners                                 |
/// | prepare         | ballot (u64, i32)                                                               |
/// | promise         | ballot, the lock's ballot and view                                              |
/// | proposal        | ballot, view                                                                    |
/// | acknowledgement | ballot                                                                          |
/// | decision        | none: the view is the decided one                                               |
/// | beat            | none: its sender is in next_view                                                |
/// | hail            | none: a coordinator asks a member that has not reported whether it is further   |
/// | join            | a member: who asks to be let in; the view is empty                              |

#include <cstddef>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "ferry/status.hpp"
#include "membership/view.hpp"

namespace ferry::membership {

struct Beat {};
struct Hail {};
struct Join {
  Member member{};
};

using Content = std::variant<Report, Prepare, Promise, Proposal, Acknowledgement, Decision, Beat, Hail, Join>;

struct Letter {
  View view{};  ///< current view of the sender, the decided one in a Decision
  Content content{};
};

std::vector<std::byte> encode(const View& view, const Content& content);

/// @errors kTransport: the bytes are no letter
Result<Letter> decode(std::span<const std::byte> bytes);

}  // namespace ferry::membership

#endif  // FERRY_MEMBERSHIP_MESSAGES_HPP

#include "membership/view_watch.hpp"

#include <fmt/format.h>

namespace ferry::membership {
namespace {

/// Time before members are asked: a bootstrap whose members all live is over by then, and needs no further connections.
constexpr std::int64_t kDelayNs = 30'000'000;

}  // namespace

ViewWatch::ViewWatch(const View& view, const Member& self, const Caller& caller)
    : view_(view), self_(self), caller_(caller), begin_(bootstrap::Deadline::after(kDelayNs)) {}

Status ViewWatch::check() {
  if (!begin_.expired()) return {};
  if (links_.empty()) {
    const bool is_root = view_.members.front().is_same_process(self_);
    for (std::size_t rank = 0; rank < (is_root ? view_.members.size() : 1); ++rank) {
      if (view_.members[rank].is_same_process(self_)) continue;
      links_.try_emplace(static_cast<int>(rank), view_.members[rank], caller_).first->second.open_with(view_, Hail{});
    }
  }
  for (auto& [rank, link] : links_) {
    link.advance();
    // Only members that are in next_view, or further, answer a hail.
    const bool is_further = !link.take_letters().empty();
    if (!link.is_dead() && !is_further) continue;
    return Status(ErrorCode::kPeerLost,
                  fmt::format("Membership::bootstrap: rank {} (id {}) {}; call next_view", rank,
                              view_.members[static_cast<std::size_t>(rank)].id,
                              is_further ? "asks for the next view, or has it" : "has ended"),
                  rank);
  }
  return {};
}

}  // namespace ferry::membership

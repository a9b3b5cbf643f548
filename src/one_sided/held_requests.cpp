#include "one_sided/held_requests.hpp"

#include <algorithm>
#include <span>
#include <utility>

namespace ferry::one_sided {

bool HeldRequests::hold(const NetworkRequest& request) {
  Held held{request, {}};
  const std::span<const std::byte> source(request.local, request.copy_source ? request.num_bytes : 0);
  Queue& to = queue(request.peer);
  if (sizeof(Held) + source.size() > max_bytes_of_peer_ - to.num_bytes) return false;
  if (!source.empty()) {
    held.source.assign(source.begin(), source.end());
    held.request.local = held.source.data();
  }
  if (to.requests.empty()) peers_.push_back(request.peer);
  to.num_bytes += held.num_bytes();
  to.requests.push_back(std::move(held));
  return true;
}

const NetworkRequest* HeldRequests::find(const CanIssue& can_issue) {
  const auto found = std::ranges::find_if(peers_, can_issue);
  return found == peers_.end() ? nullptr : &queue(*found).requests.front().request;
}

void HeldRequests::drop_front(int peer) {
  Queue& from = queue(peer);
  from.num_bytes -= from.requests.front().num_bytes();
  from.requests.pop_front();
  const auto place = std::ranges::find(peers_, peer);
  if (from.requests.empty()) {
    peers_.erase(place);
  } else {
    std::rotate(place, place + 1, peers_.end());
  }
}

}  // namespace ferry::one_sided

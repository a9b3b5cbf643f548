#include "ucx_card/wire.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <utility>

namespace ferry::ucx_card {

std::uint64_t Wire::carry(Wire& sends, Wire* receives, std::uint64_t now_ns, std::uint64_t wire_ns) {
  Wire& other = receives == nullptr ? sends : *receives;
  wire_ns = std::max<std::uint64_t>(wire_ns, 1);  // a few bytes stay behind what their end has sent before
  // Always in the same order, since an end may send to another that sends to it.
  const bool swapped = std::less<>()(&other, &sends);
  const std::unique_lock first((swapped ? other : sends).mutex_);
  std::unique_lock second((swapped ? sends : other).mutex_, std::defer_lock);
  if (&other != &sends) second.lock();
  sends.forget(now_ns);
  other.forget(now_ns);
  std::uint64_t at_ns = now_ns;
  while (wire_ns > 0) {
    const Span free_here = sends.free_from(at_ns);
    const Span free_there = other.free_from(free_here.begin_ns);
    at_ns = free_there.begin_ns;
    if (at_ns >= free_here.end_ns) continue;  // busy here again by then
    const std::uint64_t end_ns = std::min({at_ns + wire_ns, free_here.end_ns, free_there.end_ns});
    sends.add({at_ns, end_ns});
    if (&other != &sends) other.add({at_ns, end_ns});
    wire_ns -= end_ns - at_ns;
    at_ns = end_ns;
  }
  return at_ns;
}

void Wire::forget(std::uint64_t now_ns) {
  const auto past = [now_ns](const Span& span) { return span.end_ns <= now_ns; };
  busy_.erase(busy_.begin(), std::ranges::find_if_not(busy_, past));
}

Wire::Span Wire::free_from(std::uint64_t at_ns) const {
  for (const Span& span : busy_) {
    if (at_ns < span.begin_ns) return {at_ns, span.begin_ns};
    at_ns = std::max(at_ns, span.end_ns);
  }
  return {at_ns, std::numeric_limits<std::uint64_t>::max()};
}

void Wire::add(Span busy) {
  auto next = std::ranges::find_if(busy_, [&busy](const Span& span) { return span.begin_ns >= busy.end_ns; });
  if (next != busy_.end() && next->begin_ns == busy.end_ns) {
    next->begin_ns = busy.begin_ns;
  } else {
    next = busy_.insert(next, busy);
  }
  if (next == busy_.begin() || std::prev(next)->end_ns != busy.begin_ns) return;
  std::prev(next)->end_ns = next->end_ns;
  busy_.erase(next);
}

}  // namespace ferry::ucx_card

#include "net/loopback/faults.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "net/loopback/inbox.hpp"

namespace ferry::net {
namespace {

struct Rules {
  std::mutex mutex;
  /// Lets engines of programs without faults, all but tests, skip the lock.
  std::atomic<bool> any{false};
  std::map<std::pair<int, int>, loopback::PairRule> by_pair;
  std::uint64_t seed = 0;
};

Rules& rules() {
  static Rules instance;
  return instance;
}

template <typename Change>
void change_rule(int from, int to, Change change) {
  {
    const std::lock_guard lock(rules().mutex);
    change(rules().by_pair[{from, to}]);
  }
  loopback::wake_all_ends();
}

}  // namespace

LoopbackFaults::LoopbackFaults() { rules().any = true; }

LoopbackFaults::~LoopbackFaults() {
  {
    const std::lock_guard lock(rules().mutex);
    rules().by_pair.clear();
    rules().seed = 0;
    rules().any = false;
  }
  loopback::wake_all_ends();
}

void LoopbackFaults::delay(int from, int to, int num_polls) {
  change_rule(from, to, [num_polls](loopback::PairRule& rule) { rule.delay_polls = num_polls; });
}

void LoopbackFaults::hold(int from, int to) {
  change_rule(from, to, [](loopback::PairRule& rule) { rule.held = true; });
}

void LoopbackFaults::release(int from, int to) {
  change_rule(from, to, [](loopback::PairRule& rule) {
    rule.held = false;
    rule.delay_polls = 0;
  });
}

void LoopbackFaults::reorder(std::uint64_t seed) {
  const std::lock_guard lock(rules().mutex);
  rules().seed = seed == 0 ? 1 : seed;
}

void LoopbackFaults::drop(int from, int to) {
  change_rule(from, to, [](loopback::PairRule& rule) { rule.dropped = true; });
}

void LoopbackFaults::cut(int a, int b) {
  change_rule(a, b, [](loopback::PairRule& rule) { rule.cut = true; });
  change_rule(b, a, [](loopback::PairRule& rule) { rule.cut = true; });
}

loopback::PairRule loopback::rule_for(int from, int to) {
  if (!rules().any) return {};
  const std::lock_guard lock(rules().mutex);
  const auto found = rules().by_pair.find({from, to});
  return found == rules().by_pair.end() ? PairRule{} : found->second;
}

std::uint64_t loopback::reorder_seed() {
  if (!rules().any) return 0;
  const std::lock_guard lock(rules().mutex);
  return rules().seed;
}

}  // namespace ferry::net

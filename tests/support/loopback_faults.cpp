#include "support/loopback_faults.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "net/loopback/inbox.hpp"
#include "net/loopback/rules.hpp"

namespace ferry::net {
namespace {

constexpr int kAnySize = 0;

class InjectedRules final : public loopback::Rules {
 public:
  loopback::PairRule for_pair(int from, int to, int num_ends) override {
    const std::lock_guard lock(mutex);
    const auto of_size = by_pair.find({from, to, num_ends});
    const auto found = of_size == by_pair.end() ? by_pair.find({from, to, kAnySize}) : of_size;
    return found == by_pair.end() ? loopback::PairRule{} : found->second;
  }

  loopback::MixRule mix() override {
    const std::lock_guard lock(mutex);
    return mixed;
  }

  void count_delayed() override { ++num_delayed; }

  void count_overtaken(bool stale_notify) override {
    ++num_overtaken;
    if (stale_notify) ++num_stale_notifies;
  }

  std::mutex mutex;
  std::map<std::tuple<int, int, int>, loopback::PairRule> by_pair;  // by the ends and the size of the network
  loopback::MixRule mixed;
  std::atomic<std::uint64_t> num_delayed{0};
  std::atomic<std::uint64_t> num_overtaken{0};
  std::atomic<std::uint64_t> num_stale_notifies{0};
};

InjectedRules& rules() {
  static InjectedRules instance;
  return instance;
}

template <typename Change>
void change_rule(int from, int to, Change change, int num_ends = kAnySize) {
  {
    const std::lock_guard lock(rules().mutex);
    change(rules().by_pair[{from, to, num_ends}]);
  }
  loopback::wake_all_ends();
}

void set_mix(loopback::Mix mix, std::uint64_t seed) {
  const std::lock_guard lock(rules().mutex);
  rules().mixed = {mix, seed};
}

}  // namespace

LoopbackFaults::LoopbackFaults() {
  rules().num_delayed = 0;
  rules().num_overtaken = 0;
  rules().num_stale_notifies = 0;
  loopback::imposed_rules.store(&rules(), std::memory_order_release);
}

LoopbackFaults::~LoopbackFaults() {
  loopback::imposed_rules.store(nullptr, std::memory_order_release);
  {
    const std::lock_guard lock(rules().mutex);
    rules().by_pair.clear();
    rules().mixed = {};
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

void LoopbackFaults::reorder(std::uint64_t seed) { set_mix(loopback::Mix::kChannels, seed); }

void LoopbackFaults::scramble(std::uint64_t seed) { set_mix(loopback::Mix::kAll, seed); }

void LoopbackFaults::drop(int from, int to) {
  change_rule(from, to, [](loopback::PairRule& rule) { rule.dropped = true; });
}

void LoopbackFaults::cut(int a, int b, int num_ends) {
  const auto cut = [](loopback::PairRule& rule) { rule.cut = true; };
  change_rule(a, b, cut, num_ends);
  change_rule(b, a, cut, num_ends);
}

void LoopbackFaults::cut_nodes(int a, int b, int num_nodes, int ranks_per_node) {
  cut(a, b, num_nodes);
  for (int i = 0; i < ranks_per_node; ++i) {
    for (int k = 0; k < ranks_per_node; ++k) {
      cut(a * ranks_per_node + i, b * ranks_per_node + k, num_nodes * ranks_per_node);
    }
  }
}

LoopbackFaultCounts LoopbackFaults::counts() const {
  return {.num_delayed = rules().num_delayed,
          .num_overtaken = rules().num_overtaken,
          .num_stale_notifies = rules().num_stale_notifies};
}

}  // namespace ferry::net

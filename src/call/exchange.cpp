#include "call/exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "plan/to_size.hpp"

namespace ferry::call {

Exchange::Exchange(CallSync& sync, std::span<const rail::Flow> flows, std::string_view waiting_for)
    : sync_(sync), progress_(sync.rails()), wait_(sync.state(), waiting_for) {
  for (const int node : sync.rails().peer_nodes()) sync.rails().ring(node).begin(flows[to_size(node)]);
}

Status Exchange::end_turn(bool moved) {
  rail::Rails& rails = sync_.rails();
  for (const int node : rails.peer_nodes()) {
    const Status& fault = rails.ring(node).fault();
    if (fault.ok()) continue;
    return sync_.fail(
        fault.code(), fault.peer(),
        fmt::format("{}: {}; run the same build on every rank", sync_.state().operation(), fault.message()));
  }
  if (moved) {
    wait_.progressed();
    return {};
  }
  const auto is_missing = [&rails](int node) { return !rails.ring(node).finished(); };
  finished_ = std::ranges::none_of(rails.peer_nodes(), is_missing);
  if (finished_) return {};
  return wait_.idle([&](std::vector<int>* missing) {
    for (const int node : rails.peer_nodes()) {
      if (is_missing(node)) missing->push_back(rails.rank_of(node));
    }
  });
}

Status exchange_bytes(CallSync& sync, const std::vector<std::span<const std::byte>>& out,
                      const std::vector<std::span<std::byte>>& in, std::string_view waiting_for) {
  constexpr auto kItemBytes = static_cast<std::size_t>(kRowGranuleBytes);
  rail::Rails& rails = sync.rails();
  std::vector<rail::Flow> flows(out.size());
  for (const int node : rails.peer_nodes()) {
    flows[to_size(node)] = {static_cast<std::int64_t>(out[to_size(node)].size() / kItemBytes),
                            static_cast<std::int64_t>(in[to_size(node)].size() / kItemBytes), kItemBytes, kItemBytes};
  }
  std::vector<std::size_t> num_received(out.size(), 0);
  Exchange exchange(sync, flows, waiting_for);
  while (!exchange.finished()) {
    exchange.begin_turn();
    bool moved = false;
    for (const int node : rails.peer_nodes()) {
      rail::Ring& ring = rails.ring(node);
      if (const rail::Ring::Batch batch = ring.reserve(); batch.num_items > 0) {
        std::memcpy(batch.to, out[to_size(node)].data() + to_size(batch.first) * kItemBytes,
                    to_size(batch.num_items) * kItemBytes);
        ring.commit(batch);
        moved = true;
      }
      if (const std::span<const std::byte> arrived = ring.front(); !arrived.empty()) {
        std::size_t& received = num_received[to_size(node)];
        std::memcpy(in[to_size(node)].data() + received, arrived.data(), arrived.size());
        received += arrived.size();
        ring.release(static_cast<std::int64_t>(arrived.size() / kItemBytes));
        moved = true;
      }
    }
    if (Status status = exchange.end_turn(moved); !status.ok()) return status;
  }
  return {};
}

}  // namespace ferry::call

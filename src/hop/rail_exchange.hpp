#ifndef FERRY_HOP_RAIL_EXCHANGE_HPP
#define FERRY_HOP_RAIL_EXCHANGE_HPP

/// One exchange of equal items with every rail peer, in order and through the rings: what both ends do, whatever the
/// items are. How many items go each way is known to both ends beforehand, and checked chunk by chunk.
///
/// Nothing here waits. A task offers items to send, uses those that have come, and sleeps when neither is possible.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "hop/chunk_reader.hpp"
#include "hop/rails.hpp"

namespace ferry::hop {

/// What goes to and comes from one node.
struct Flow {
  std::int64_t num_out = 0;
  std::int64_t num_in = 0;
  std::size_t out_item_bytes = 0;  ///< a multiple of 16, at most Rails::chunk_capacity()
  std::size_t in_item_bytes = 0;
};

class RailExchange {
 public:
  /// `flows` by node; this node's own is not looked at. A node between which and this one no item goes either way takes
  /// part with no chunk.
  RailExchange(Rails& rails, std::vector<Flow> flows);

  /// Writes items [first, first + count) for `node` one after the other at `to`, which is aligned to 16 bytes.
  using Write = std::function<void(int node, std::int64_t first, std::int64_t count, std::byte* to)>;
  /// Fills and sends at most one chunk to each node. True if any was sent.
  bool send(const Write& write);

  /// The items from `node` that have come and were not used yet: whole items, in order, aligned to 16 bytes. Empty too
  /// when the peer broke the rules (see fault()).
  std::span<const std::byte> front(int node);
  /// The first `count` items of front(node) are used.
  void pop(int node, std::int64_t count);

  bool all_sent() const;
  bool all_used() const;
  /// Adds the ranks that have not sent, or not made room, for what is left.
  void list_missing(std::vector<int>* ranks) const;

  /// What a peer did wrong, if one did; the exchange cannot go on then.
  const Status& fault() const { return fault_; }

 private:
  struct State {
    Flow flow;
    std::uint64_t exchange_idx = 0;
    std::int64_t num_sent = 0;
    ChunkReader in;
  };

  Rails& rails_;
  std::vector<State> states_;  // by node
  std::vector<int> order_;     // the other nodes, from the next one on
  Status fault_;
};

}  // namespace ferry::hop

#endif  // FERRY_HOP_RAIL_EXCHANGE_HPP

#ifndef FERRY_CALL_EXCHANGE_HPP
#define FERRY_CALL_EXCHANGE_HPP

/// One exchange of items with all rail peers. The caller moves the items, in turns:
///
///     Exchange exchange(sync, flows, "to send its rows");
///     while (!exchange.finished()) {
///       exchange.begin_turn();
///       bool moved = …reserve, write and commit…;
///       moved |= …front, use and release…;
///       if (Status status = exchange.end_turn(moved); !status.ok()) return status;
///     }

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "call/call_sync.hpp"
#include "call/wait.hpp"

namespace ferry::call {

class Exchange {
 public:
  /// `flows` by node; this node's own entry is ignored. `waiting_for`: as for Wait.
  Exchange(CallSync& sync, std::span<const rail::Flow> flows, std::string_view waiting_for);

  void begin_turn() { wait_.begin_poll(); }
  /// `moved`: the caller did something in this turn. If not, waits for the network or ends the exchange.
  /// @errors the group is broken
  Status end_turn(bool moved);
  bool finished() const { return finished_; }

 private:
  CallSync& sync_;
  rail::Rails::InlineProgress progress_;
  Wait wait_;
  bool finished_ = false;
};

/// Sends `out[node]` to the rail peer in each other node and fills `in[node]` from it. Lengths are multiples of 16,
/// known to both ends.
Status exchange_bytes(CallSync& sync, const std::vector<std::span<const std::byte>>& out,
                      const std::vector<std::span<std::byte>>& in, std::string_view waiting_for);

}  // namespace ferry::call

#endif  // FERRY_CALL_EXCHANGE_HPP

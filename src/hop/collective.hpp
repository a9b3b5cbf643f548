#ifndef FERRY_HOP_COLLECTIVE_HPP
#define FERRY_HOP_COLLECTIVE_HPP

/// A collective call over all nodes: every rank learns what all others call, by way of its rail peers and then of its
/// node, and all agree or refuse together. No rank talks to more than its rail and its node.

#include <functional>
#include <string>
#include <vector>

#include "hop/call_notice.hpp"
#include "hop/rail_exchange.hpp"
#include "hop/rails.hpp"
#include "node/crew.hpp"

namespace ferry::hop {

class Collective {
 public:
  Collective(node::Crew& crew, Rails& rails) : crew_(crew), rails_(rails) {}

  /// As Crew::begin, over all nodes.
  Status begin(node::Ticket ticket);
  /// What a rank of any node said at `begin`: those fields that a call may depend on.
  struct Said {
    std::int64_t max_recv_rows = 0;
    std::int64_t num_entries = 0;
  };
  const Said& said_by(int rank) const { return said_[static_cast<std::size_t>(rank)]; }

  /// How a call moves the items of an exchange.
  struct Items {
    RailExchange::Write write;
    /// Uses what has come: calls front and pop. True if it used any.
    std::function<bool(RailExchange&)> use;
    /// Does a bit of other work, for moments when the network has none. False: there is no more.
    std::function<bool()> meanwhile;
    std::string waiting_for;  ///< "to send its rows"
  };
  /// Runs one exchange with all rail peers to its end.
  Status exchange(std::vector<Flow> flows, const Items& items);

 private:
  Status collect();

  node::Crew& crew_;
  Rails& rails_;
  std::string operation_;
  std::vector<CallNotice> notices_;  // by rank; of this node's own none
  std::vector<Said> said_;           // by rank
};

}  // namespace ferry::hop

#endif  // FERRY_HOP_COLLECTIVE_HPP

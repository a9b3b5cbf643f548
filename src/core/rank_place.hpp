#ifndef FERRY_CORE_RANK_PLACE_HPP
#define FERRY_CORE_RANK_PLACE_HPP

#include <string>

namespace ferry {

/// Where a rank of the group runs, as this rank sees it.
struct RankPlace {
  bool on_this_host = false;     ///< shares memory and the loopback interface with this rank
  bool in_this_network = false;  ///< has the same network interfaces as this rank
  std::string address{};         ///< at which other hosts reach it, as it says itself; empty if it does not know
};

}  // namespace ferry

#endif  // FERRY_CORE_RANK_PLACE_HPP

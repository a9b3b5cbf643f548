#ifndef FERRY_CORE_RANK_PLACE_HPP
#define FERRY_CORE_RANK_PLACE_HPP

#include <string>

namespace ferry {

/// Location of a rank of the group, relative to this rank.
struct RankPlace {
  bool on_this_host = false;     ///< shares memory and the loopback interface with this rank
  bool in_this_network = false;  ///< has the same network interfaces as this rank
  std::string address{};         ///< address at which other hosts reach it, by its own account; empty if it has none
};

}  // namespace ferry

#endif  // FERRY_CORE_RANK_PLACE_HPP

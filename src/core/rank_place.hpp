#ifndef FERRY_CORE_RANK_PLACE_HPP
#define FERRY_CORE_RANK_PLACE_HPP

#include <cstdint>
#include <string>

namespace ferry {

/// Rates in Gb/s of the network card ports of a rank, by link layer: sums over the fastest ports of a layer; 0: none.
/// Plain bytes, exchanged at creation.
struct LayerRates {
  std::int32_t infiniband = 0;
  std::int32_t ethernet = 0;
};

/// Location of a rank of the group, relative to this rank.
struct RankPlace {
  bool on_this_host = false;     ///< shares memory and the loopback interface with this rank
  bool in_this_network = false;  ///< has the same network interfaces as this rank
  std::string address{};         ///< address at which other hosts reach it, by its own account; empty if it has none
  LayerRates rates{};            ///< ports that it may use
};

}  // namespace ferry

#endif  // FERRY_CORE_RANK_PLACE_HPP

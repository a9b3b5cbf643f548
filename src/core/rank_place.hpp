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

/// Whether a rank proposes rings in GPU memory where GroupOptions::ring_memory is "auto", or why it does not.
enum class RingProposal : std::int32_t {
  kNotAsked = 0,  ///< the option is another, or the rank has no GPU
  kProposed,      ///< everything is there that can be seen before ranks connect
  kNoTransport,   ///< the network has no cards
  kNoCard,        ///< no usable card
  kFarCard,       ///< no usable card is near the GPU
  kNoGpu,         ///< cards cannot reach the GPU's memory
  kNoDriver,      ///< the host's kernel gives cards no access to GPU memory
  kNoLibrary      ///< the network's library does not work with GPU memory
};

/// Location of a rank of the group, relative to this rank.
struct RankPlace {
  bool on_this_host = false;     ///< shares memory and the loopback interface with this rank
  bool in_this_network = false;  ///< has the same network interfaces as this rank
  std::string address{};         ///< address at which other hosts reach it, by its own account; empty if it has none
  LayerRates rates{};            ///< ports that it may use
  RingProposal ring_proposal = RingProposal::kNotAsked;
};

}  // namespace ferry

#endif  // FERRY_CORE_RANK_PLACE_HPP

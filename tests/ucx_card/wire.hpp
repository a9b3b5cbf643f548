#ifndef FERRY_TESTS_UCX_CARD_WIRE_HPP
#define FERRY_TESTS_UCX_CARD_WIRE_HPP

#include <cstdint>
#include <vector>

#include "ucx_card/card_mutex.hpp"

namespace ferry::ucx_card {

/// One direction of a card's port, and when it is busy. Operations share it as the queue pairs of a card do: one that
/// waits for the other end's wire holds up none to other ends.
class Wire {
 public:
  void set_spins(bool spins) { mutex_.set_spins(spins); }

  /// Time at which both wires have carried something that takes `wire_ns`, from `now_ns` on, in what earlier calls have
  /// left free of both: behind all earlier calls with the same two. `receives` null: only the first one counts.
  static std::uint64_t carry(Wire& sends, Wire* receives, std::uint64_t now_ns, std::uint64_t wire_ns);

 private:
  struct Span {
    std::uint64_t begin_ns = 0;
    std::uint64_t end_ns = 0;
  };

  void forget(std::uint64_t now_ns);
  /// First time from `at_ns` on at which it is free, and how long it stays so.
  Span free_from(std::uint64_t at_ns) const;
  void add(Span busy);

  CardMutex mutex_;
  std::vector<Span> busy_;  // in order, with gaps between them
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_WIRE_HPP

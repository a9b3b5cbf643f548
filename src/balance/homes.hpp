#ifndef FERRY_BALANCE_HOMES_HPP
#define FERRY_BALANCE_HOMES_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/block.hpp"

namespace ferry::balancing {

/// Number of replicas of each expert on each rank. Its memory grows with the places, not with experts times ranks.
class Homes {
 public:
  struct Home {
    std::size_t rank = 0;
    std::int32_t count = 0;  ///< at least 1
  };

  /// Empty places (-1) of `placement` are skipped; it may have no places at all.
  Homes(const Block& block, const Placement& placement);

  /// 0 where the rank does not have the expert.
  std::int32_t at(std::size_t expert, std::size_t rank) const;
  /// Ranks of an expert, ascending.
  const std::vector<Home>& of(std::size_t expert) const { return homes_[expert]; }
  void add(std::size_t expert, std::size_t rank);
  void remove(std::size_t expert, std::size_t rank);

 private:
  std::vector<std::vector<Home>> homes_;
};

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_HOMES_HPP

#ifndef FERRY_TESTS_PLANNED_ROUTING_HPP
#define FERRY_TESTS_PLANNED_ROUTING_HPP

#include <vector>

#include "oracle/oracle.hpp"

namespace ferry::test {

/// What route must give by the functions of src/plan, which CPU backends call and kernels compute by themselves. The
/// world is one that the oracle accepts.
std::vector<oracle::RankRouting> planned_routings(const oracle::World& world);

}  // namespace ferry::test

#endif  // FERRY_TESTS_PLANNED_ROUTING_HPP

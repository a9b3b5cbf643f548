#ifndef FERRY_TESTS_PLANNED_ROUTING_HPP
#define FERRY_TESTS_PLANNED_ROUTING_HPP

#include <vector>

#include "oracle/oracle.hpp"

namespace ferry::test {

/// Results of route by the functions of src/plan, which CPU backends call and which kernels reimplement. The oracle
/// must accept `world`.
std::vector<oracle::RankRouting> planned_routings(const oracle::World& world);

}  // namespace ferry::test

#endif  // FERRY_TESTS_PLANNED_ROUTING_HPP

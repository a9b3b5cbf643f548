#ifndef FERRY_CPU_LOCAL_EXPANSION_HPP
#define FERRY_CPU_LOCAL_EXPANSION_HPP

#include "plan/expansion.hpp"

namespace ferry::cpu {

void expand_rows(const plan::ExpandParams& params);
void reduce_rows(const plan::ReduceParams& params);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_LOCAL_EXPANSION_HPP

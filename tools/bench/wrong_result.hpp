#ifndef FERRY_TOOLS_BENCH_WRONG_RESULT_HPP
#define FERRY_TOOLS_BENCH_WRONG_RESULT_HPP

#include <string>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Error that ends a measurement with wrong data.
inline Status wrong_result(const std::string& what) {
  return {ErrorCode::kInternal, what + "; the timings of a wrong result would mean nothing"};
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_WRONG_RESULT_HPP

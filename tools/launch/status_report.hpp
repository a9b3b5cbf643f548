#ifndef FERRY_TOOLS_LAUNCH_STATUS_REPORT_HPP
#define FERRY_TOOLS_LAUNCH_STATUS_REPORT_HPP

/// A Status as the report of a rank: code, peer and message survive the way to another process.

#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::launch {

/// Empty for an ok status.
std::string encode_status(const Status& status);
/// kInternal where `report` is neither empty nor what encode_status returns.
Status decode_status(std::string_view report);

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_STATUS_REPORT_HPP

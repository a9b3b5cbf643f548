#ifndef FERRY_TOOLS_LAUNCH_STATUS_REPORT_HPP
#define FERRY_TOOLS_LAUNCH_STATUS_REPORT_HPP

/// Status as the report of a rank: code, peer and message are preserved on the way to another process.

#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::launch {

/// Empty for an ok status.
std::string encode_status(const Status& status);
/// kInternal if `report` is neither empty nor a result of encode_status.
Status decode_status(std::string_view report);

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_STATUS_REPORT_HPP

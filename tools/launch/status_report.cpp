#include "launch/status_report.hpp"

#include <cstdint>
#include <cstring>

namespace ferry::launch {

namespace {

/// Header of the message. Both sides are the same program.
struct Header {
  std::int32_t code;
  std::int32_t peer;
};

}  // namespace

std::string encode_status(const Status& status) {
  if (status.ok()) return {};
  const Header header{static_cast<std::int32_t>(status.code()), status.peer()};
  std::string report(sizeof header, '\0');
  std::memcpy(report.data(), &header, sizeof header);
  return report.append(status.message());
}

Status decode_status(std::string_view report) {
  if (report.empty()) return {};
  Header header{};
  if (report.size() < sizeof header) return {ErrorCode::kInternal, "the report of a rank ends in its header"};
  std::memcpy(&header, report.data(), sizeof header);
  return {static_cast<ErrorCode>(header.code), std::string(report.substr(sizeof header)), header.peer};
}

}  // namespace ferry::launch

#ifndef FERRY_TOOLS_REPORT_JSON_REPORT_HPP
#define FERRY_TOOLS_REPORT_JSON_REPORT_HPP

#include <nlohmann/json.hpp>
#include <string>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Keeps keys in insertion order, so that reports read like the printed tables.
using Json = nlohmann::ordered_json;
/// Indentation of everything that write_json writes.
inline constexpr int kJsonIndent = 2;

/// Reads JSON of a user's file. The error says what is wrong and at which line and column, without the file's name.
/// @errors kInvalidArgument
inline Result<Json> parse_json(const std::string& text) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    const std::string why = error.what();  // "[json.exception.parse_error.101] parse error at line 3, column 6: …"
    return Status(ErrorCode::kInvalidArgument, why.substr(why.find(' ') + 1));
  }
}

/// Writes `report` to `path` like write_text (report/output.hpp); "-" is standard output.
/// @errors kSystem
Status write_json(const std::string& path, const Json& report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_JSON_REPORT_HPP

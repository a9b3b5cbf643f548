#ifndef FERRY_TOOLS_REPORT_JSON_REPORT_HPP
#define FERRY_TOOLS_REPORT_JSON_REPORT_HPP

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Keeps keys in the order in which they were set, so that reports read like the printed tables.
using Json = nlohmann::ordered_json;

/// Write `report` to `path`, "-" being standard output. A file is replaced only once the new one is complete.
/// @errors kSystem
Status write_json(const std::string& path, const Json& report);

/// Where human-readable text goes while a report goes to `path`: standard output, or standard error where the report is
/// printed on standard output.
std::FILE* text_stream(const std::string& path);

/// The same for any text; `what` names it in errors, e.g. "the picture".
/// @errors kSystem
Status write_text(const std::string& path, std::string_view text, std::string_view what);

/// Opens `path` for writing and closes it again, to refuse a bad path before a long run rather than after it.
Status check_writable(const std::string& path, std::string_view what = "the report");

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_JSON_REPORT_HPP

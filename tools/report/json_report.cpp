#include "report/json_report.hpp"

#include "report/output.hpp"

namespace ferry::tools {

namespace {
constexpr int kIndent = 2;
}  // namespace

Status write_json(const std::string& path, const Json& report) {
  return write_text(path, report.dump(kIndent) + "\n", "the report");
}

}  // namespace ferry::tools

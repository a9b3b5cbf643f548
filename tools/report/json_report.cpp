#include "report/json_report.hpp"

#include "report/output.hpp"

namespace ferry::tools {

Status write_json(const std::string& path, const Json& report) {
  return write_text(path, report.dump(kJsonIndent) + "\n", "the report");
}

}  // namespace ferry::tools

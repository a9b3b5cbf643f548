#ifndef FERRY_TOOLS_DOCTOR_FACTS_HPP
#define FERRY_TOOLS_DOCTOR_FACTS_HPP

#include "report/json_report.hpp"

namespace ferry::tools {

/// Facts about this machine for programs that read the report: numbers and names, where findings are sentences.
Json read_facts();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DOCTOR_FACTS_HPP

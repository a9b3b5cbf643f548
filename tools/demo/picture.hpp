#ifndef FERRY_TOOLS_DEMO_PICTURE_HPP
#define FERRY_TOOLS_DEMO_PICTURE_HPP

#include <string>

#include "demo/report.hpp"

namespace ferry::tools {

/// Who sent how many rows to whom, what each rank received, and the load of each expert, as SVG text.
std::string draw_picture(const DemoReport& report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_PICTURE_HPP

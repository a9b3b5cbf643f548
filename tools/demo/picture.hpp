#ifndef FERRY_TOOLS_DEMO_PICTURE_HPP
#define FERRY_TOOLS_DEMO_PICTURE_HPP

#include <string>

#include "demo/report.hpp"

namespace ferry::tools {

/// Rows sent by each rank to each rank, rows received by each, and the load of each expert, as SVG text.
std::string draw_picture(const DemoReport& report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_PICTURE_HPP

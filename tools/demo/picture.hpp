#ifndef FERRY_TOOLS_DEMO_PICTURE_HPP
#define FERRY_TOOLS_DEMO_PICTURE_HPP

#include <string>

#include "demo/report.hpp"

namespace ferry::tools {

/// SVG text that shows the rows sent by each rank to each rank, the rows received by each, and the load of each expert.
std::string draw_picture(const DemoReport& report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_PICTURE_HPP

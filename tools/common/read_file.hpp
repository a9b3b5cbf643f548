#ifndef FERRY_TOOLS_COMMON_READ_FILE_HPP
#define FERRY_TOOLS_COMMON_READ_FILE_HPP

#include <cstddef>
#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::tools {

/// First `max_bytes` of a file, pipe or device, or all of it; `what` names it in errors, e.g. "the text".
/// @errors kSystem
Result<std::string> read_file(const std::string& path, std::string_view what, std::size_t max_bytes);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_READ_FILE_HPP

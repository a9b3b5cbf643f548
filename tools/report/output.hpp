#ifndef FERRY_TOOLS_REPORT_OUTPUT_HPP
#define FERRY_TOOLS_REPORT_OUTPUT_HPP

/// Output of the command: text on its standard streams, and files that the user names.

#include <cstdio>
#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Writes `text` to `path`; "-" is standard output. `what` names the file in errors, e.g. "the picture". Symbolic links
/// are followed. A regular file is replaced once the new one is complete, with the same permissions, or written in
/// place if it cannot be replaced (hard links, another owner, a folder that is not writable). Any other target, such as
/// a device, a pipe or /dev/fd/5, is written to.
/// @errors kSystem
Status write_text(const std::string& path, std::string_view text, std::string_view what);

/// Checks as far as possible without side effects that `write_text` can write there, to refuse a bad path before a long
/// run rather than after it. Ok for an empty path.
/// @errors kSystem
Status check_writable(const std::string& path, std::string_view what);

/// Stream for human-readable text while a report goes to `path`: standard output, or standard error if the report is
/// printed on standard output.
std::FILE* text_stream(const std::string& path);

/// Writes all of `text` now. Only a failure of standard output is reported: there is no stream to report a failure of
/// standard error.
/// @errors kSystem: also if an earlier write of the stream failed
Status print(std::FILE* stream, std::string_view text);
/// Writes to standard error; failures are ignored.
void print_error(std::string_view text);

/// Call at the start of the program: opens closed standard streams, so that no file or socket gets their number.
/// Writing to a standard output that was closed still fails.
void hold_standard_streams();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_OUTPUT_HPP

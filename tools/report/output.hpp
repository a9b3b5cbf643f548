#ifndef FERRY_TOOLS_REPORT_OUTPUT_HPP
#define FERRY_TOOLS_REPORT_OUTPUT_HPP

/// What the command writes: text on its standard streams, and files that the user names.

#include <cstdio>
#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::tools {

/// Writes `text` to `path`, "-" being standard output; `what` names it in errors, e.g. "the picture". Symbolic links
/// are followed. A regular file is replaced once the new one is complete, with its permissions, or written in place
/// where it cannot be replaced (hard links, another owner, a folder that cannot be written). Anything else, such as a
/// device, a pipe or /dev/fd/5, is written to.
/// @errors kSystem
Status write_text(const std::string& path, std::string_view text, std::string_view what);

/// Whether `write_text` can write there, as far as can be told without a trace, to refuse a bad path before a long run
/// rather than after it. Ok for an empty path.
/// @errors kSystem
Status check_writable(const std::string& path, std::string_view what);

/// Where human-readable text goes while a report goes to `path`: standard output, or standard error where the report is
/// printed on standard output.
std::FILE* text_stream(const std::string& path);

/// Writes all of `text` now. Only a failure of standard output is reported: where standard error cannot be written,
/// nobody is there to be told.
/// @errors kSystem: also where an earlier write of the stream failed
Status print(std::FILE* stream, std::string_view text);
/// To standard error, whatever comes of it.
void print_error(std::string_view text);

/// For the start of the program: standard streams that are closed are opened, so that no file or socket takes their
/// number. Writing to a standard output that was closed still fails.
void hold_standard_streams();

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_OUTPUT_HPP

#include "report/json_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace ferry::tools {

namespace {

constexpr int kIndent = 2;

Status cannot_write(const std::string& path, std::string_view what) {
  return {ErrorCode::kSystem,
          fmt::format("cannot write {} {}: {}; name a file in a folder that exists and can be written", what, path,
                      std::strerror(errno))};
}

std::string partial_path(const std::string& path) { return fmt::format("{}.{}.part", path, ::getpid()); }

}  // namespace

Status write_json(const std::string& path, const Json& report) {
  return write_text(path, report.dump(kIndent) + "\n", "the report");
}

Status write_text(const std::string& path, std::string_view text, std::string_view what) {
  if (path == "-") {
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
    return written ? Status() : cannot_write("to standard output", what);
  }
  const std::string partial = partial_path(path);
  {
    std::ofstream file(partial, std::ios::binary | std::ios::trunc);
    file << text;
    file.close();
    if (!file) {
      const Status status = cannot_write(path, what);
      std::remove(partial.c_str());
      return status;
    }
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    const Status status = cannot_write(path, what);
    std::remove(partial.c_str());
    return status;
  }
  return {};
}

std::FILE* text_stream(const std::string& path) { return path == "-" ? stderr : stdout; }

Status check_writable(const std::string& path, std::string_view what) {
  if (path.empty() || path == "-") return {};
  const std::string partial = partial_path(path);
  const std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  if (!file) return cannot_write(path, what);
  std::remove(partial.c_str());
  return {};
}

}  // namespace ferry::tools

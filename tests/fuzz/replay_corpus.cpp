/// main() of a target without libFuzzer: runs it over files, so that every compiler and every sanitizer checks the
/// inputs that fuzzing found. Usage: <target>_fuzz FILE|FOLDER…

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "fuzz_target.hpp"

namespace {

std::vector<std::filesystem::path> files_in(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool replay(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file.is_open() || file.bad()) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    return false;
  }
  // Printed and flushed before the run: the last line names the input that ended the process.
  std::printf("%s, %zu bytes\n", path.c_str(), content.size());
  std::fflush(stdout);
  // A copy of exactly this size, so that a sanitizer detects the first byte read past the end.
  const auto exact = std::make_unique<std::byte[]>(content.size());
  std::transform(content.begin(), content.end(), exact.get(), [](char c) { return static_cast<std::byte>(c); });
  ferry::test::fuzz_one({exact.get(), content.size()});
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  int num_replayed = 0;
  for (int i = 1; i < argc; ++i) {
    for (const std::filesystem::path& path : files_in(argv[i])) {
      if (!replay(path)) return 1;
      ++num_replayed;
    }
  }
  std::printf("%d inputs replayed\n", num_replayed);
  return num_replayed > 0 ? 0 : 1;
}

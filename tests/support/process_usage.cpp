#include "support/process_usage.hpp"

#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "support/counted_new.hpp"

namespace ferry::test {
namespace {

/// Only the environment at program start decides this.
bool allocator_caches_for_threads() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return tunables == nullptr ||
         std::string_view(tunables).find("glibc.malloc.tcache_count=0") == std::string_view::npos;
}

}  // namespace

ProcessUsage process_usage() {
  ProcessUsage usage;
  std::size_t num_pages = 0;
  std::ifstream statm("/proc/self/statm");
  if (!(statm >> num_pages >> num_pages)) throw std::runtime_error("cannot read /proc/self/statm");
  usage.resident_bytes = num_pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  usage.new_bytes = new_bytes();
#if __GLIBC_PREREQ(2, 33)
  if (!allocator_caches_for_threads()) usage.heap_bytes = mallinfo2().uordblks;
#endif
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    ++usage.num_mappings;
    if (line.find('/') != std::string::npos) ++usage.num_file_mappings;
  }
  if (usage.num_mappings == 0) throw std::runtime_error("cannot read /proc/self/maps");
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  usage.num_descriptors = static_cast<std::size_t>(std::distance(begin(descriptors), end(descriptors)));
  return usage;
}

}  // namespace ferry::test

#include "support/process_usage.hpp"

#include <malloc.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace ferry::test {

ProcessUsage process_usage() {
  ProcessUsage usage;
  std::size_t num_pages = 0;
  std::ifstream statm("/proc/self/statm");
  if (!(statm >> num_pages >> num_pages)) throw std::runtime_error("cannot read /proc/self/statm");
  usage.resident_bytes = num_pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
#if __GLIBC_PREREQ(2, 33)
  usage.heap_bytes = mallinfo2().uordblks;
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

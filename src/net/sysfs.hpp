#ifndef FERRY_NET_SYSFS_HPP
#define FERRY_NET_SYSFS_HPP

/// Small files through which the kernel describes devices.

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace ferry::net {

/// First line of a file; empty if there is none.
inline std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// -1: no number. `>>` is avoided because it uses the locale of the process's C++ library, and a Python module brings
/// its own.
inline int number_in(const std::filesystem::path& path) {
  const std::string text = first_line(path);
  int number = -1;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  return read.ec == std::errc() ? number : -1;
}

/// Link to the PCI device at `pci_address` ("0000:1b:00.0", in either case).
inline std::filesystem::path pci_device(std::string_view pci_address, const std::filesystem::path& sys) {
  std::string address(pci_address);
  std::ranges::transform(address, address.begin(),
                         [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return sys / "bus/pci/devices" / address;
}

}  // namespace ferry::net

#endif  // FERRY_NET_SYSFS_HPP

#include "launch/listening_sockets.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

namespace ferry::launch {

namespace {

constexpr std::string_view kListen = "0A";  // TCP_LISTEN, as proc_pid_net(5) shows it
constexpr int kHex = 16;
constexpr std::size_t kDigitsPerWord = 8;

/// Inodes of the process's sockets.
std::set<std::string> sockets_of(const std::filesystem::path& process) {
  constexpr std::string_view kPrefix = "socket:[";
  std::set<std::string> inodes;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(process / "fd", error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code vanished;
    const std::string target = std::filesystem::read_symlink(entry->path(), vanished).string();
    if (target.starts_with(kPrefix)) inodes.insert(target.substr(kPrefix.size(), target.size() - kPrefix.size() - 1));
  }
  return inodes;
}

std::uint32_t parse_hex(std::string_view digits) {
  std::uint32_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, kHex);
  return value;
}

/// Parses "0100007F:1F90": words in memory order, then the port.
ListeningSocket parse(std::string_view text) {
  ListeningSocket socket;
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) return socket;
  socket.port = static_cast<int>(parse_hex(text.substr(colon + 1)));
  std::array<std::uint32_t, 4> words{};
  const std::size_t num_words = std::min(colon / kDigitsPerWord, words.size());
  for (std::size_t i = 0; i < num_words; ++i) words[i] = parse_hex(text.substr(i * kDigitsPerWord, kDigitsPerWord));
  std::array<char, INET6_ADDRSTRLEN> printed{};
  if (num_words == 1) {
    inet_ntop(AF_INET, words.data(), printed.data(), printed.size());
    constexpr int kNetworkShift = 24;
    socket.loopback = ntohl(words[0]) >> kNetworkShift == IN_LOOPBACKNET;
  } else {
    in6_addr address{};
    std::memcpy(&address, words.data(), sizeof address);
    inet_ntop(AF_INET6, &address, printed.data(), printed.size());
    socket.loopback = IN6_IS_ADDR_LOOPBACK(&address) != 0;
  }
  socket.address = printed.data();
  return socket;
}

}  // namespace

std::vector<ListeningSocket> listening_sockets(pid_t pid) {
  const std::filesystem::path process = std::filesystem::path("/proc") / std::to_string(pid);
  const std::set<std::string> own = sockets_of(process);
  std::vector<ListeningSocket> listening;
  for (const char* family : {"tcp", "tcp6"}) {
    std::ifstream table(process / "net" / family);
    std::string line;
    std::getline(table, line);  // the header
    while (std::getline(table, line)) {
      // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode
      std::istringstream fields(line);
      std::string number;
      std::string local;
      std::string remote;
      std::string state;
      std::string inode;
      fields >> number >> local >> remote >> state;
      for (int field = 0; field < 6; ++field) fields >> inode;
      if (state == kListen && own.contains(inode)) listening.push_back(parse(local));
    }
  }
  return listening;
}

}  // namespace ferry::launch

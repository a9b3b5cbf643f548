#include "net/ucx/paths.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <sstream>
#include <utility>

namespace ferry::net::ucx {
namespace {

/// A lane by which a card writes into the peer's memory by itself.
bool writes_by_card(const Lane& lane) { return lane.transport.starts_with("rc") || lane.transport.starts_with("dc"); }

}  // namespace

std::vector<Lane> lanes_of(const Library& library, ucp_ep_h endpoint) {
  char* text = nullptr;
  std::size_t num_bytes = 0;
  std::FILE* file = open_memstream(&text, &num_bytes);
  if (file == nullptr) return {};
  library.ep_print_info(endpoint, file);
  std::fclose(file);
  const std::string info(text, num_bytes);
  std::free(text);
  return parse_lanes(info);
}

/// Parses lines such as "#   lane[0]:  1:tcp/eth0.0 md[1]   -> md[1]/tcp/sysdev[255] rma am am_bw#0 keepalive wireup".
std::vector<Lane> parse_lanes(std::string_view info) {
  std::vector<Lane> lanes;
  std::istringstream lines{std::string(info)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash;
    std::string number;
    Lane lane;
    words >> hash >> number >> lane.transport;
    if (!number.starts_with("lane[") || lane.transport.empty()) continue;
    if (const std::size_t number_end = lane.transport.find(':'); number_end != std::string::npos) {
      lane.transport.erase(0, number_end + 1);
    }
    for (std::string word; words >> word;) {
      lane.messages |= word == "am";
      lane.puts |= word == "rma";
    }
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

std::string describe(const std::vector<Lane>& lanes) {
  if (lanes.empty()) return "unknown";
  std::string text;
  for (const Lane& lane : lanes) {
    if (!text.empty()) text += ", ";
    text += lane.transport;
    if (lane.puts && lane.messages) {
      text += " (puts, messages)";
    } else if (lane.puts || lane.messages) {
      text += lane.puts ? " (puts)" : " (messages)";
    }
  }
  return text;
}

bool are_in_memory(const std::vector<Lane>& lanes) {
  return !lanes.empty() && std::ranges::all_of(lanes, [](const Lane& lane) {
    return lane.transport.find("/memory") != std::string::npos;
  });
}

std::size_t num_writing_lanes(const std::vector<Lane>& lanes) {
  return static_cast<std::size_t>(std::ranges::count_if(lanes, writes_by_card));
}

bool have_remote_writes(const std::vector<Lane>& lanes) {
  return std::ranges::any_of(lanes, [](const Lane& lane) { return lane.puts && writes_by_card(lane); });
}

std::size_t num_writing_devices(const std::vector<Lane>& lanes) {
  std::set<std::string> devices;
  for (const Lane& lane : lanes) {
    if (!writes_by_card(lane)) continue;
    // "rc_mlx5/mlx5_0:1.0": the last number is that of a path of the device.
    const std::size_t begin = lane.transport.find('/');
    const std::size_t end = lane.transport.rfind('.');
    if (begin != std::string::npos) devices.insert(lane.transport.substr(begin + 1, end - begin - 1));
  }
  return devices.size();
}

}  // namespace ferry::net::ucx

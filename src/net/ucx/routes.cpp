#include "net/ucx/routes.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace ferry::net::ucx {

std::string describe_endpoint(const Library& library, ucp_ep_h endpoint) {
  char* text = nullptr;
  std::size_t num_bytes = 0;
  std::FILE* file = open_memstream(&text, &num_bytes);
  if (file == nullptr) return "unknown";
  library.ep_print_info(endpoint, file);
  std::fclose(file);
  const std::string info(text, num_bytes);
  std::free(text);
  return describe_lanes(info);
}

/// Lines such as "#   lane[0]:  1:tcp/eth0.0 md[1]   -> md[1]/tcp/sysdev[255] rma am am_bw#0 keepalive wireup".
std::string describe_lanes(std::string_view info) {
  std::string lanes;
  std::istringstream lines{std::string(info)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash;
    std::string lane;
    std::string transport;
    words >> hash >> lane >> transport;
    if (!lane.starts_with("lane[") || transport.empty()) continue;
    if (const std::size_t number_end = transport.find(':'); number_end != std::string::npos) {
      transport.erase(0, number_end + 1);
    }
    bool messages = false;
    bool puts = false;
    for (std::string word; words >> word;) {
      messages |= word == "am";
      puts |= word == "rma";
    }
    if (!lanes.empty()) lanes += ", ";
    lanes += transport;
    if (messages || puts) lanes += messages && puts ? " (puts, messages)" : messages ? " (messages)" : " (puts)";
  }
  return lanes.empty() ? std::string("unknown") : lanes;
}

}  // namespace ferry::net::ucx

#include "net/ucx/routes.hpp"

#include <cstdio>
#include <cstdlib>

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

std::string describe_lanes(std::string_view info) { return std::string(info); }

}  // namespace ferry::net::ucx

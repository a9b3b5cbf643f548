/// UCX engine's own part of a published address (net/ucx/address.hpp). Input: any bytes.

#include <vector>

#include "fuzz_target.hpp"
#include "net/ucx/address.hpp"

namespace ferry::test {

void fuzz_one(std::span<const std::byte> input) {
  using namespace net::ucx;
  const std::vector<std::byte> bytes(input.begin(), input.end());  // the sanitizer detects an access beyond its end
  const Result<EndAddress> address = parse_address(bytes);
  if (!address.ok()) {
    require_refusal(address.status(), ErrorCode::kTransport);
    return;
  }
  for (const ScopeAddress& scope : address->scopes) {
    for (const std::span<const std::byte> part : {scope.worker, scope.memory_key, scope.gpu_key}) {
      require(part.empty() || (part.data() >= bytes.data() && part.data() + part.size() <= bytes.data() + bytes.size()),
              "a part is inside the published address");
    }
  }
  require(same_bytes(encode_address(*address), bytes), "a parsed address has one encoding");
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    require(!parse_address(std::span(bytes).first(length)).ok(), "a truncated address does not parse");
  }
}

}  // namespace ferry::test

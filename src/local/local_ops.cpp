#include "local/local_ops.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "core/backend.hpp"

namespace ferry {

Result<const LocalOps*> find_local_ops(std::string_view operation, std::string_view backend) {
  for (const BackendFactory& factory : backend_factories()) {
    if (factory.name == backend) return factory.local;
  }
  std::vector<std::string_view> names;
  for (const BackendFactory& factory : backend_factories()) names.push_back(factory.name);
  return Status(backend == "cuda" ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument,
                fmt::format("{}: backend is \"{}\", expected one of this build's: {}", operation, backend,
                            fmt::join(names, ", ")));
}

}  // namespace ferry

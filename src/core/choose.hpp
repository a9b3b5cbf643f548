#ifndef FERRY_CORE_CHOOSE_HPP
#define FERRY_CORE_CHOOSE_HPP

/// Choice of one component of a build by its name: a backend, a network.

#include <fmt/format.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"

namespace ferry {

/// The factory called `name`, or with "auto" the first that runs here. `option` is the name of the choice in messages
/// ("Group::create: backend"). `by_itself(factory)`: whether "auto" may choose it.
template <typename Factory, typename ByItself>
Result<const Factory*> choose_factory(std::string_view option, std::string_view name,
                                      std::span<const Factory> factories, ByItself by_itself) {
  std::string reasons;
  std::vector<std::string_view> names;
  ErrorCode code = ErrorCode::kUnsupported;
  for (const Factory& factory : factories) {
    names.push_back(factory.name);
    if (name != factory.name && (name != "auto" || !by_itself(factory))) continue;
    const Status status = factory.probe();
    if (status.ok()) return &factory;
    if (status.code() == ErrorCode::kSystem) code = ErrorCode::kSystem;  // a temporary shortage
    reasons += fmt::format("; {}: {}", factory.name, status.message());
  }
  if (!reasons.empty()) {
    return Status(code, fmt::format("{} \"{}\" cannot run on this machine{}", option, name, reasons));
  }
  return Status(ErrorCode::kInvalidArgument, fmt::format("{} is \"{}\", expected \"auto\" or one of this build's: {}",
                                                         option, name, fmt::join(names, ", ")));
}

template <typename Factory>
Result<const Factory*> choose_factory(std::string_view option, std::string_view name,
                                      std::span<const Factory> factories) {
  return choose_factory(option, name, factories, [](const Factory&) { return true; });
}

}  // namespace ferry

#endif  // FERRY_CORE_CHOOSE_HPP

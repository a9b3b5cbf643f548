#include "run/exit_code.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "report/output.hpp"

namespace ferry::tools {

namespace {

/// Options that the library's advice names, and the options of this command that set them.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kOptions = {
    {{"GroupOptions::arena_bytes", "--arena"},
     {"GroupOptions::timeout_ns", "--timeout"},
     {"GroupOptions::transport", "--transport"},
     {"GroupOptions::ring_memory", "--ring-memory"},
     {"GroupOptions::backend", "--backend"},
     {"GroupOptions::verify", "--verify"}}};

std::string in_terms_of_options(std::string_view message) {
  std::string text(message);
  for (const auto& [member, option] : kOptions) {
    for (std::size_t at = text.find(member); at != std::string::npos; at = text.find(member, at + option.size())) {
      text.replace(at, member.size(), option);
    }
  }
  return text;
}

}  // namespace

int report_failure(const char* command, const Status& status, int exit_code) {
  std::fflush(stdout);
  std::string kind;
  if (exit_code == kExitFailed) {
    kind = fmt::format(" ({}{})", to_string(status.code()),
                       status.peer() < 0 ? "" : fmt::format(", rank {}", status.peer()));
  }
  print_error(fmt::format("ferry{}{}: {}{}\n", *command == '\0' ? "" : " ", command,
                          in_terms_of_options(status.message()), kind));
  return exit_code;
}

}  // namespace ferry::tools

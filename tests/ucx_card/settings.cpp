#include "ucx_card/settings.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace ferry::ucx_card {
namespace {

[[noreturn]] void refuse(std::string_view item) {
  std::fprintf(stderr, "FERRY_UCX_CARD: \"%.*s\" is not a setting\n", static_cast<int>(item.size()), item.data());
  std::abort();
}

std::uint64_t number_in(std::string_view text, std::string_view item) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) refuse(item);
  return number;
}

void apply(std::string_view item, Settings* settings) {
  const std::size_t sign = std::min(item.find('='), item.size());
  const std::string_view name = item.substr(0, sign);
  const std::string_view value = item.substr(std::min(sign + 1, item.size()));
  if (name == "fail") {
    const auto* const found = std::ranges::find(kCallNames, value);
    if (found == kCallNames.end()) refuse(item);
    settings->fail = static_cast<std::uint64_t>(found - kCallNames.begin());
    return;
  }
  const std::array<std::pair<std::string_view, std::uint64_t*>, 17> numbers{{
      {"seed", &settings->seed},
      {"latency_ns", &settings->latency_ns},
      {"write_latency_ns", &settings->write_latency_ns},
      {"close_latency_ns", &settings->close_latency_ns},
      {"piece_bytes", &settings->piece_bytes},
      {"gpu_lag", &settings->gpu_lag},
      {"gpu", &settings->gpu},
      {"steady", &settings->steady},
      {"rate", &settings->rate},
      {"on_time", &settings->on_time},
      {"spin", &settings->spin},
      {"thread", &settings->thread},
      {"cards", &settings->cards},
      {"fail_at", &settings->fail_at},
      {"status", &settings->status},
      {"now", &settings->now},
      {"end", &settings->end},
  }};
  for (const auto& [known, number] : numbers) {
    if (name != known) continue;
    *number = number_in(value, item);
    return;
  }
  refuse(item);
}

}  // namespace

Settings Settings::from_environment() {
  const char* text = std::getenv("FERRY_UCX_CARD");
  return from(text != nullptr ? text : "");
}

Settings Settings::from(std::string_view text) {
  Settings settings;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    if (end > 0) apply(text.substr(0, end), &settings);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  if (settings.piece_bytes == 0) refuse("piece_bytes=0");
  return settings;
}

}  // namespace ferry::ucx_card

#include "report/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

namespace ferry::tools {

namespace {

constexpr double kKilo = 1000.0;

std::string three_figures(double value, std::string_view unit) {
  const int num_decimals = value >= 100.0 ? 0 : value >= 10.0 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, num_decimals, unit);
}

template <std::size_t kNumUnits>
std::string scaled(double value, const std::array<std::string_view, kNumUnits>& units) {
  std::size_t unit_idx = 0;
  // 999.5 and above would print with four figures.
  while (value >= 999.5 && unit_idx + 1 < kNumUnits) {
    value /= kKilo;
    ++unit_idx;
  }
  return three_figures(value, units[unit_idx]);
}

/// Eighths of a character cell, so that short bars still differ.
std::string unicode_bar(std::int64_t num_eighths) {
  static constexpr std::array<std::string_view, 8> kPartial = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  std::string bar;
  for (std::int64_t i = 0; i < num_eighths / 8; ++i) bar += "█";
  bar += kPartial[static_cast<std::size_t>(num_eighths % 8)];
  return bar;
}

}  // namespace

std::string Table::to_string() const {
  std::vector<std::size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line = " ";
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i == 0 ? fmt::format(" {:<{}}", row[i], widths[i]) : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    text += line + "\n";
  }
  return text;
}

std::string bar_chart(const std::vector<Bar>& bars, int width, bool unicode) {
  std::int64_t largest = 1;
  std::size_t label_width = 0;
  for (const Bar& bar : bars) {
    largest = std::max(largest, bar.value);
    label_width = std::max(label_width, bar.label.size());
  }
  std::string text;
  for (const Bar& bar : bars) {
    const std::int64_t num_eighths = bar.value * width * 8 / largest;
    const std::string blocks =
        unicode ? unicode_bar(num_eighths) : std::string(static_cast<std::size_t>((num_eighths + 7) / 8), '#');
    text += fmt::format("  {:>{}} {}{}{}\n", bar.label, label_width, blocks, blocks.empty() ? "" : " ", bar.value);
  }
  return text;
}

bool locale_is_utf8() {
  // Order in which POSIX determines the character type of a locale.
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    std::string text(value);
    std::transform(text.begin(), text.end(), text.begin(),
                   [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; });
    return text.find("UTF-8") != std::string::npos || text.find("UTF8") != std::string::npos;
  }
  return false;
}

std::string format_bytes(double bytes) {
  static constexpr std::array<std::string_view, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  return bytes < kKilo ? fmt::format("{:.0f} B", bytes) : scaled(bytes, kUnits);
}

std::string format_ns(std::int64_t ns) {
  static constexpr std::array<std::string_view, 4> kUnits = {"ns", "us", "ms", "s"};
  return scaled(static_cast<double>(ns), kUnits);
}

}  // namespace ferry::tools

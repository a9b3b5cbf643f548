#ifndef FERRY_TOOLS_REPORT_TABLE_HPP
#define FERRY_TOOLS_REPORT_TABLE_HPP

/// Human-readable text: aligned tables, bar charts, byte counts.

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::tools {

/// Columns are aligned to the right, the first one to the left.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add_row(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// One bar of a chart.
struct Bar {
  std::string label;
  std::int64_t value = 0;
};

/// One line per bar, the longest `width` characters wide. `unicode`: block characters, otherwise '#'.
std::string bar_chart(const std::vector<Bar>& bars, int width, bool unicode);

/// True if the environment's locale is UTF-8.
bool locale_is_utf8();

/// "17.3 MB": decimal units, three figures.
std::string format_bytes(double bytes);

/// "1.25 ms", "340 us": three figures.
std::string format_ns(std::int64_t ns);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_TABLE_HPP

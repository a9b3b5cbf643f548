#ifndef FERRY_BENCHMARKS_OPTIONS_HPP
#define FERRY_BENCHMARKS_OPTIONS_HPP

/// The command line of a benchmark. Programs that include CLI11 each compile all of it, which takes ten times as long
/// as their own code; options.cpp compiles it once for all of them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ferry::benchmarks {

/// Bounds of a number, both allowed.
struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

class Options {
 public:
  explicit Options(const std::string& description);
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;
  ~Options();

  // An option sets `value`, which is its default.
  void add(const std::string& name, int& value, const std::string& help, std::optional<Range> range = {});
  void add(const std::string& name, std::int64_t& value, const std::string& help, std::optional<Range> range = {});
  void add(const std::string& name, std::size_t& value, const std::string& help, std::optional<Range> range = {});
  void add(const std::string& name, double& value, const std::string& help);
  /// `choices`: the values that are allowed; any if there are none.
  void add(const std::string& name, std::string& value, const std::string& help,
           const std::vector<std::string>& choices = {});
  void add_file(const std::string& name, std::string& value, const std::string& help);
  void add_flag(const std::string& name, bool& value, const std::string& help);
  // Lists are separated by commas.
  void add(const std::string& name, std::vector<int>& values, const std::string& help);
  void add(const std::string& name, std::vector<std::int64_t>& values, const std::string& help);
  void add(const std::string& name, std::vector<std::size_t>& values, const std::string& help);

  /// Exit code of a program that ends here, after an error or --help.
  std::optional<int> parse(int argc, char** argv);

 private:
  struct Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace ferry::benchmarks

#endif  // FERRY_BENCHMARKS_OPTIONS_HPP

#include "options.hpp"

#include <CLI/CLI.hpp>

namespace ferry::benchmarks {
namespace {

template <class T>
void add_number(CLI::App& app, const std::string& name, T& value, const std::string& help, std::optional<Range> range) {
  CLI::Option* option = app.add_option(name, value, help)->capture_default_str();
  if (range.has_value()) option->check(CLI::Range(range->first, range->last));
}

template <class T>
void add_list(CLI::App& app, const std::string& name, std::vector<T>& values, const std::string& help) {
  app.add_option(name, values, help)->capture_default_str()->delimiter(',');
}

}  // namespace

struct Options::Parser {
  CLI::App app;
};

Options::Options(const std::string& description) : parser_(std::make_unique<Parser>()) {
  parser_->app.description(description);
}

Options::~Options() = default;

void Options::add(const std::string& name, int& value, const std::string& help, std::optional<Range> range) {
  add_number(parser_->app, name, value, help, range);
}

void Options::add(const std::string& name, std::int64_t& value, const std::string& help, std::optional<Range> range) {
  add_number(parser_->app, name, value, help, range);
}

void Options::add(const std::string& name, std::size_t& value, const std::string& help, std::optional<Range> range) {
  add_number(parser_->app, name, value, help, range);
}

void Options::add(const std::string& name, double& value, const std::string& help) {
  add_number(parser_->app, name, value, help, {});
}

void Options::add(const std::string& name, std::string& value, const std::string& help,
                  const std::vector<std::string>& choices) {
  CLI::Option* option = parser_->app.add_option(name, value, help)->capture_default_str();
  if (!choices.empty()) option->check(CLI::IsMember(choices));
}

void Options::add_file(const std::string& name, std::string& value, const std::string& help) {
  parser_->app.add_option(name, value, help)->check(CLI::ExistingFile);
}

void Options::add_flag(const std::string& name, bool& value, const std::string& help) {
  parser_->app.add_flag(name, value, help);
}

void Options::add(const std::string& name, std::vector<int>& values, const std::string& help) {
  add_list(parser_->app, name, values, help);
}

void Options::add(const std::string& name, std::vector<std::int64_t>& values, const std::string& help) {
  add_list(parser_->app, name, values, help);
}

void Options::add(const std::string& name, std::vector<std::size_t>& values, const std::string& help) {
  add_list(parser_->app, name, values, help);
}

std::optional<int> Options::parse(int argc, char** argv) {
  try {
    parser_->app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parser_->app.exit(error);
  }
  return std::nullopt;
}

}  // namespace ferry::benchmarks

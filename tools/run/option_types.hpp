#ifndef FERRY_TOOLS_RUN_OPTION_TYPES_HPP
#define FERRY_TOOLS_RUN_OPTION_TYPES_HPP

/// Types of command-line options that the commands share.

#include <fmt/format.h>

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace ferry::tools {

/// Refuses values that are not a whole number from `low` to `high`, where CLI::Range would accept a number that wraps
/// into the range.
template <typename T>
CLI::Validator whole_number(T low, T high) {
  const std::string range = fmt::format("from {} to {}", low, high);
  const auto check = [low, high, range](const std::string& given) {
    T value{};
    const char* const end = given.data() + given.size();
    const auto [stop, error] = std::from_chars(given.data(), end, value);
    if (error == std::errc() && stop == end && value >= low && value <= high) return std::string();
    return fmt::format("{} is not a whole number {}", given, range);
  };
  return {check, "INT " + range, "whole number"};
}

/// Refuses NaN, which CLI::Range accepts because it is not less than any bound.
inline std::string is_number(const std::string& given) {
  return std::isnan(std::strtod(given.c_str(), nullptr)) ? given + " is not a number" : std::string();
}

/// Option that takes whole numbers, separated by commas. CLI11's own lists leave out empty items.
template <typename T>
CLI::Option* add_whole_numbers(CLI::App& command, const std::string& name, std::vector<T>* values,
                               std::pair<T, T> range, const std::string& description) {
  const auto items_of = [](const std::string& given) {
    std::vector<std::string> items(1);
    for (const char character : given) {
      if (character == ',') {
        items.emplace_back();
      } else {
        items.back() += character;
      }
    }
    return items;
  };
  const CLI::Validator number = whole_number(range.first, range.second);
  const auto check = [items_of, number](std::string& given) {
    for (const std::string& item : items_of(given)) {
      if (item.empty()) return fmt::format("\"{}\" has an empty item", given);
      if (std::string error = number(item); !error.empty()) return error;
    }
    return std::string();
  };
  const auto take = [values, items_of](const std::vector<std::string>& given) {
    values->clear();
    for (const std::string& list : given) {
      for (const std::string& item : items_of(list)) {
        std::from_chars(item.data(), item.data() + item.size(), values->emplace_back());
      }
    }
  };
  return command.add_option_function<std::vector<std::string>>(name, take, description)
      ->check(CLI::Validator(check, fmt::format("INT from {} to {},...", range.first, range.second), "whole numbers"));
}

/// Refuses an empty path, which a script passes if a variable is not set.
inline CLI::Validator path() {
  const auto check = [](const std::string& given) {
    return std::string(given.empty() ? "the path is empty; name a file, or leave the option out" : "");
  };
  return {check, "FILE", "path"};
}

/// Option with a fixed set of names as values.
template <typename T>
void add_choice(CLI::App& command, const std::string& name, T* value,
                const std::vector<std::pair<std::string, T>>& choices, const std::string& description) {
  std::string names;
  for (const auto& [choice, ignored] : choices) names += (names.empty() ? "" : ",") + choice;
  const auto take = [value, choices](const std::string& given) {
    for (const auto& [choice, meaning] : choices) {
      if (choice == given) *value = meaning;
    }
  };
  const auto check = [choices, names](const std::string& given) {
    for (const auto& [choice, ignored] : choices) {
      if (choice == given) return std::string();
    }
    return given + " not in {" + names + "}";
  };
  command.add_option_function<std::string>(name, take, description)
      ->check(CLI::Validator(check, "", "choice"))
      ->option_text("{" + names + "}");
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_OPTION_TYPES_HPP

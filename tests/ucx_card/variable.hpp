#ifndef FERRY_TESTS_UCX_CARD_VARIABLE_HPP
#define FERRY_TESTS_UCX_CARD_VARIABLE_HPP

#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace ferry::test {

/// Sets an environment variable until it is destroyed.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Settings of cards that are opened during its life.
class CardSettings {
 public:
  explicit CardSettings(std::string_view settings)
      : variable_("FERRY_UCX_CARD", fmt::format("gpu={},{}", kRealGpus ? 1 : 0, settings)) {}

 private:
#ifdef FERRY_TEST_REAL_GPUS
  static constexpr bool kRealGpus = true;
#else
  static constexpr bool kRealGpus = false;
#endif
  Variable variable_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_UCX_CARD_VARIABLE_HPP

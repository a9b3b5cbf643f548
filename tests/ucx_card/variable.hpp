#ifndef FERRY_TESTS_UCX_CARD_VARIABLE_HPP
#define FERRY_TESTS_UCX_CARD_VARIABLE_HPP

#include <cstdlib>
#include <optional>
#include <string>

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
  explicit CardSettings(const std::string& settings) : variable_("FERRY_UCX_CARD", settings) {}

 private:
  Variable variable_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_UCX_CARD_VARIABLE_HPP

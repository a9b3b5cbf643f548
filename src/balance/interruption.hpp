#ifndef FERRY_BALANCE_INTERRUPTION_HPP
#define FERRY_BALANCE_INTERRUPTION_HPP

#include <chrono>
#include <functional>

namespace ferry::balancing {

/// Asks the program at times whether to stop (BalanceOptions::interrupted): at once, then ten times a second.
class Interruption {
 public:
  explicit Interruption(const std::function<bool()>& ask) : ask_(ask) {}

  /// True from the moment when the program wants to stop. Takes tens of nanoseconds between two questions.
  bool asked() {
    if (asked_ || !ask_) return asked_;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_question_) return false;
    next_question_ = now + kInterval;
    asked_ = ask_();
    return asked_;
  }

 private:
  /// Short for a person who presses Ctrl-C, and cheap for a program that must take a lock to answer.
  static constexpr std::chrono::milliseconds kInterval{100};

  const std::function<bool()>& ask_;
  std::chrono::steady_clock::time_point next_question_{};
  bool asked_ = false;
};

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_INTERRUPTION_HPP

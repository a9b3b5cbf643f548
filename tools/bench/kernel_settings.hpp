#ifndef FERRY_TOOLS_BENCH_KERNEL_SETTINGS_HPP
#define FERRY_TOOLS_BENCH_KERNEL_SETTINGS_HPP

/// Command-line options of bench and tune.

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <map>
#include <string>

#include "ferry/exchange.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// An option that takes one of some names.
template <typename T>
void add_choice(CLI::App& command, const std::string& name, T* value, const std::map<std::string, T>& choices,
                const std::string& description) {
  std::string names;
  for (const auto& [choice, ignored] : choices) names += (names.empty() ? "" : ",") + choice;
  command.add_option(name, *value, description)
      ->transform(CLI::CheckedTransformer(choices))
      ->option_text("{" + names + "}");
}

/// --num-sms, --num-copy-sms, --chunk-tokens, --copy-path.
void add_kernel_options(CLI::App& command, KernelOptions* kernel);
/// "num_sms 8, num_copy_sms default, …".
std::string describe(const KernelOptions& kernel);
Json to_json(const KernelOptions& kernel);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_KERNEL_SETTINGS_HPP

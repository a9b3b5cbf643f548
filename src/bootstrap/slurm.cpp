#include "bootstrap/slurm.hpp"

#include <charconv>
#include <cstdint>

namespace ferry::bootstrap {
namespace {

/// SLURM_MAX_NORMAL_STEP_ID (slurm.h). Steps above it are batch scripts, interactive shells and the like.
constexpr std::uint32_t kLastStepOfSrun = 0xfffffff0;

}  // namespace

bool is_step_of_srun(const char* step_id) {
  if (step_id == nullptr) return false;
  const std::string_view digits(step_id);
  std::uint32_t step = 0;
  const auto [stop, error] = std::from_chars(digits.begin(), digits.end(), step);
  return error == std::errc() && stop == digits.end() && step <= kLastStepOfSrun;
}

std::string first_host_of_node_list(std::string_view node_list) {
  const auto is_host_character = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '.' ||
           c == '_';
  };
  std::string host;
  for (std::size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      if (!is_host_character(node_list[i])) return {};
      host += node_list[i];
      continue;
    }
    const std::size_t end = node_list.find(']', i);
    if (end == std::string_view::npos) return {};
    // "[03-07,9]": take the digits before the first '-' or ','.
    const std::string_view numbers = node_list.substr(i + 1, end - i - 1);
    const std::string_view first = numbers.substr(0, numbers.find_first_of("-,"));
    if (first.empty() || first.find_first_not_of("0123456789") != std::string_view::npos) return {};
    host += first;
    i = end;
  }
  return host;
}

}  // namespace ferry::bootstrap

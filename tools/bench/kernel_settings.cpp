#include "bench/kernel_settings.hpp"

#include <fmt/format.h>

#include "bench/bench_plan.hpp"
#include "run/option_types.hpp"

namespace ferry::tools {

namespace {

constexpr int kMaxSms = 1024;
constexpr int kMaxChunkTokens = 1 << 20;

std::string or_default(int value) { return value == 0 ? "default" : fmt::to_string(value); }

}  // namespace

void add_kernel_options(CLI::App& command, KernelOptions* kernel) {
  command.add_option("--num-sms", kernel->num_sms, "CUDA: multiprocessors of a call (default 0: as measured)")
      ->check(whole_number(0, kMaxSms));
  command
      .add_option("--num-copy-sms", kernel->num_copy_sms,
                  "CUDA: of those, the ones that only copy inside the GPU (default 0: as measured)")
      ->check(whole_number(0, kMaxSms));
  command
      .add_option("--chunk-tokens", kernel->chunk_tokens,
                  "CUDA: tokens between two reports to the receivers (default 0: as measured)")
      ->check(whole_number(0, kMaxChunkTokens));
  add_choice<CopyPath>(command, "--copy-path", &kernel->copy_path,
                       {{"auto", CopyPath::kAuto}, {"bulk", CopyPath::kBulk}, {"load-store", CopyPath::kLoadStore}},
                       "CUDA: how rows are carried (default auto)");
}

std::string describe(const KernelOptions& kernel) {
  return fmt::format("num_sms {}, num_copy_sms {}, chunk_tokens {}, copy_path {}", or_default(kernel.num_sms),
                     or_default(kernel.num_copy_sms), or_default(kernel.chunk_tokens), name_of(kernel.copy_path));
}

Json to_json(const KernelOptions& kernel) {
  return {{"num_sms", kernel.num_sms},
          {"num_copy_sms", kernel.num_copy_sms},
          {"chunk_tokens", kernel.chunk_tokens},
          {"copy_path", name_of(kernel.copy_path)}};
}

}  // namespace ferry::tools

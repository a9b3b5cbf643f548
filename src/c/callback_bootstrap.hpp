#ifndef FERRY_C_CALLBACK_BOOTSTRAP_HPP
#define FERRY_C_CALLBACK_BOOTSTRAP_HPP

#include <string>

#include "ferry/bootstrap.hpp"
#include "ferry/ferry.h"

namespace ferry::c {

/// Messages of any length over an all-gather of equally long ones: first the lengths, then all messages, padded to the
/// longest.
class CallbackBootstrap : public Bootstrap {
 public:
  /// `options` must have been checked.
  explicit CallbackBootstrap(const ferry_callback_options& options);

  int rank() const override { return options_.rank; }
  int num_ranks() const override { return options_.num_ranks; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;
  std::string local_address() const override { return local_address_; }

 private:
  Status gather(std::span<const std::byte> mine, std::span<std::byte> all, std::int64_t timeout_ns);
  Status gather_lengths(std::size_t length, std::vector<std::uint64_t>& lengths, std::int64_t timeout_ns);

  ferry_callback_options options_;
  std::string local_address_;
  Status failed_;  // result of every later call
};

}  // namespace ferry::c

#endif  // FERRY_C_CALLBACK_BOOTSTRAP_HPP

#ifndef FERRY_CORE_CREATE_TOGETHER_HPP
#define FERRY_CORE_CREATE_TOGETHER_HPP

/// Collective creation, which succeeds on all ranks or fails on all with one rank's error. A rank's local error at any
/// step reaches the others in the next exchange that they make, so no step may wait for a peer's part that the peer can
/// fail to do without an exchange in between.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// All-gather `mine`, or this rank's failure: if any rank failed, every rank gets the lowest such rank's error, with
/// that rank's name unless all ranks report the same.
Result<std::vector<std::vector<std::byte>>> gather_or_fail(Bootstrap& bootstrap, const Status& my_status,
                                                           std::span<const std::byte> mine, std::int64_t timeout_ns);

/// Message of a rank that takes no part: gather_or_fail gives it to the others as an empty one.
std::vector<std::byte> empty_message();

/// An attempt of all ranks that the creation can do without.
struct Attempt {
  Status failure;                                ///< the lowest failing rank's, with its name; ok if no rank failed
  std::vector<std::vector<std::byte>> messages;  ///< of all ranks, if no rank failed
};
/// Like gather_or_fail for an attempt: where a rank failed, every rank learns it, and the creation goes on.
Result<Attempt> gather_attempt(Bootstrap& bootstrap, const Status& my_status, std::span<const std::byte> mine,
                               std::int64_t timeout_ns);

/// Bootstrap of a creation, which remembers whether an exchange has failed: then all ranks have ended the creation.
class CreationBootstrap final : public Bootstrap {
 public:
  explicit CreationBootstrap(Bootstrap& bootstrap) : bootstrap_(bootstrap) {}

  int rank() const override { return bootstrap_.rank(); }
  int num_ranks() const override { return bootstrap_.num_ranks(); }
  std::string local_address() const override { return bootstrap_.local_address(); }
  /// For messages of gather_or_fail alone.
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override;
  bool has_failed() const { return has_failed_; }
  int num_exchanges() const { return num_exchanges_; }

 private:
  Bootstrap& bootstrap_;
  bool has_failed_ = false;
  int num_exchanges_ = 0;
};

/// Status of the exception that is being handled, with the name of this rank: for want of memory or of threads; others
/// are thrown again.
Status status_of_exception(std::string_view operation, int rank);

/// Status of `step`, or of its exception.
template <typename Step>
Status attempt(std::string_view operation, int rank, Step step) {
  try {
    return step();
  } catch (...) {
    return status_of_exception(operation, rank);
  }
}

/// Runs `create(bootstrap)`, which returns a Result, on all ranks. A last exchange carries an error that the others
/// have not received yet, and lets no rank return before all have succeeded.
template <typename Create, typename Created = std::invoke_result_t<Create&, Bootstrap&>>
Created create_together(Bootstrap& bootstrap, std::string_view operation, std::int64_t timeout_ns, Create create) {
  CreationBootstrap shared(bootstrap);
  const int rank = bootstrap.rank();
  std::optional<Created> made;
  Status mine = attempt(operation, rank, [&] { return made.emplace(create(shared)).status(); });
  if (!mine.ok() && shared.has_failed()) return mine;
  const auto tell = [&] { return gather_or_fail(shared, mine, {}, timeout_ns).status(); };
  const int num_exchanges = shared.num_exchanges();
  Status all = attempt(operation, rank, tell);
  if (!all.ok() && shared.num_exchanges() == num_exchanges) {
    // The exchange was not made.
    mine = all;
    all = attempt(operation, rank, tell);
  }
  if (!all.ok()) return all;
  return std::move(*made);
}

}  // namespace ferry

#endif  // FERRY_CORE_CREATE_TOGETHER_HPP

#include "run/launcher.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/timing.hpp"
#include "run/forked_ranks.hpp"

namespace ferry::tools {

namespace {

/// Every rank gets every rank's bytes, in pieces that the bootstrap accepts.
Status gather_results(Bootstrap& bootstrap, std::span<const std::byte> mine, std::vector<std::vector<std::byte>>* all,
                      std::int64_t timeout_ns) {
  all->assign(static_cast<std::size_t>(bootstrap.num_ranks()), std::vector<std::byte>(mine.size()));
  for (std::size_t offset = 0; offset < mine.size(); offset += kMaxBootstrapMessageBytes) {
    const std::size_t piece_bytes = std::min(kMaxBootstrapMessageBytes, mine.size() - offset);
    auto pieces = bootstrap.all_gather(mine.subspan(offset, piece_bytes), timeout_ns);
    if (!pieces) return pieces.status();
    for (std::size_t rank = 0; rank < pieces->size(); ++rank) {
      const std::vector<std::byte>& piece = (*pieces)[rank];
      if (piece.size() != piece_bytes) {
        return {ErrorCode::kInvalidArgument,
                "results differ in size between ranks; start every rank with the same arguments",
                static_cast<int>(rank)};
      }
      std::memcpy((*all)[rank].data() + offset, piece.data(), piece_bytes);
    }
  }
  return {};
}

}  // namespace

Status RankContext::barrier() {
  if (barrier_ != nullptr) return barrier_->wait(static_cast<std::uint32_t>(num_ranks()), timeout_ns_);
  return bootstrap_->all_gather({}, timeout_ns_).status();
}

Result<std::int64_t> RankContext::line_up() {
  if (barrier_ != nullptr) {
    if (Status status = barrier(); !status) return status;
    return barrier_->released_ns();
  }
  return largest(now_ns());
}

Result<std::int64_t> RankContext::largest(std::int64_t mine) {
  auto all = bootstrap_->all_gather(std::as_bytes(std::span(&mine, 1)), timeout_ns_);
  if (!all) return all.status();
  std::int64_t most = mine;
  for (const auto& bytes : *all) {
    std::int64_t theirs = mine;
    std::memcpy(&theirs, bytes.data(), std::min(sizeof theirs, bytes.size()));
    most = std::max(most, theirs);
  }
  return most;
}

Result<int> RunOutcome::share_exit_code(int reporter_exit_code) {
  if (bootstrap_ == nullptr) return reporter_exit_code;
  const auto mine = static_cast<std::byte>(reporter_exit_code);
  auto codes = bootstrap_->all_gather({&mine, 1}, timeout_ns_);
  if (!codes) return codes.status();
  return std::to_integer<int>(codes->front().at(0));
}

Result<RunOutcome> run_launched(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main) {
  TcpBootstrapOptions bootstrap_options = options.plan.bootstrap;
  bootstrap_options.timeout_ns = options.timeout_ns;
  Result<std::shared_ptr<Bootstrap>> bootstrap = options.plan.joined;
  if (options.plan.joined == nullptr) bootstrap = create_tcp_bootstrap(bootstrap_options);
  if (!bootstrap) return bootstrap.status();

  std::vector<std::byte> mine(options.result_bytes);
  RankContext context(*bootstrap, mine, nullptr, options.timeout_ns);
  if (Status status = rank_main(context); !status) return status;

  RunOutcome outcome;
  outcome.bootstrap_ = *bootstrap;
  outcome.timeout_ns_ = options.timeout_ns;
  if (Status status = gather_results(**bootstrap, mine, &outcome.gathered_, options.timeout_ns); !status) return status;
  outcome.results_.assign(outcome.gathered_.begin(), outcome.gathered_.end());
  return outcome;
}

Result<RunOutcome> run_forked(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main) {
  auto area = run_forked_ranks(options, rank_main);
  if (!area) return area.status();
  RunOutcome outcome;
  outcome.area_ = std::move(*area);
  for (int rank = 0; rank < options.plan.num_ranks; ++rank) {
    outcome.results_.push_back(forked_rank_result(outcome.area_, options, rank));
  }
  return outcome;
}

Result<RunOutcome> run_ranks(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main) {
  return options.plan.from_environment ? run_launched(options, rank_main) : run_forked(options, rank_main);
}

}  // namespace ferry::tools

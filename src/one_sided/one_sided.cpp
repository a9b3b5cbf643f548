#include "ferry/one_sided.hpp"

#include <fmt/format.h>

#include "core/choose.hpp"
#include "core/create_together.hpp"
#include "core/group_options.hpp"
#include "core/log.hpp"
#include "ferry/version.hpp"
#include "one_sided/core.hpp"

namespace ferry {
namespace {

using one_sided::Core;

/// Status with this call's name in place of the name of the call with which it shares its checks.
Status as_create(const Status& status) {
  constexpr std::string_view kTheirs = "Group::create";
  std::string message(status.message());
  const std::size_t at = message.find(kTheirs);
  if (at == std::string::npos) return status;
  return Status(status.code(), message.replace(at, kTheirs.size(), "OneSided::create"), status.peer());
}

/// Half of the address space that most processors give a process.
constexpr std::size_t kMaxHeapBytes = std::size_t{1} << 46;

Result<std::size_t> agree_on_heap(Bootstrap& bootstrap, const OneSidedOptions& options, const Status& my_status) {
  Status status = my_status;
  if (status.ok() && (options.heap_bytes == 0 || options.heap_bytes > kMaxHeapBytes)) {
    status = Status(ErrorCode::kInvalidArgument, fmt::format("OneSided::create: heap_bytes is {}, expected 1 to {}",
                                                             options.heap_bytes, kMaxHeapBytes));
  }
  const std::string mine = std::to_string(options.heap_bytes);
  Result<std::vector<std::vector<std::byte>>> all =
      gather_or_fail(bootstrap, status, std::as_bytes(std::span(mine)), time_to_agree_ns(options.timeout_ns));
  if (!all.ok()) return all.status();
  for (std::size_t rank = 1; rank < all->size(); ++rank) {
    if ((*all)[rank] == (*all)[0]) continue;
    const auto text = [&](std::size_t r) {
      return std::string_view(reinterpret_cast<const char*>((*all)[r].data()), (*all)[r].size());
    };
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("OneSided::create: ranks disagree: rank 0 has heap_bytes={}, rank {} has heap_bytes={}; it "
                    "must be the same on every rank",
                    text(0), rank, text(rank)),
        static_cast<int>(rank));
  }
  return node::round_up_to_page(options.heap_bytes);
}

}  // namespace

int Team::num_ranks() const { return state_ == nullptr ? 0 : static_cast<int>(state_->ranks.size()); }

int Team::rank() const { return state_ == nullptr ? -1 : state_->my_place; }

int Team::world_rank(int team_rank) const {
  return team_rank >= 0 && team_rank < num_ranks() ? state_->ranks[static_cast<std::size_t>(team_rank)] : -1;
}

OneSided::OneSided(std::unique_ptr<Core> core) : core_(std::move(core)) {}

OneSided::~OneSided() {
  // Release the core in a forked process: only the process that created it may end it.
  if (core_->num_forks != num_forks()) static_cast<void>(core_.release());
}

Result<std::shared_ptr<OneSided>> OneSided::create(std::shared_ptr<Bootstrap> bootstrap,
                                                   const OneSidedOptions& options) {
  static_cast<void>(open_log());  // its error is one of the options
  if (bootstrap == nullptr) {
    const Status status(ErrorCode::kInvalidArgument,
                        "OneSided::create: the bootstrap is null; create one with create_tcp_bootstrap or "
                        "create_in_process_bootstraps");
    log_error({}, status);
    return status;
  }
  const LogRank log_rank{bootstrap->rank(), bootstrap->num_ranks()};
  const Result<const one_sided::BackendFactory*> factory =
      choose_factory("OneSided::create: backend", options.backend, one_sided::backend_factories());
  GroupOptions base;
  // A rank without a backend still takes part in the first exchange, in which all ranks learn of its error.
  base.backend = factory.ok() ? std::string((*factory)->name) : "cpu";
  base.ranks_per_node = options.ranks_per_node;
  base.timeout_ns = options.timeout_ns;
  base.transport = options.transport;
  base.net_devices = options.net_devices;
  base.device = options.device;
  base.tuning_file = "builtin";
  const auto create_mine = [&](Bootstrap& shared) -> Result<std::shared_ptr<OneSided>> {
    Result<std::size_t> heap_bytes = agree_on_heap(shared, options, factory.status());
    if (!heap_bytes.ok()) return heap_bytes.status();
    const Result<AgreedOptions> agreed = agree_on_options(shared, base);
    if (!agreed.ok()) return agreed.status();
    const one_sided::Context context{{&shared, agreed->topology, base, {}}, *heap_bytes};
    Result<std::unique_ptr<one_sided::Backend>> backend = (*factory)->create(context);
    if (!backend.ok()) return backend.status();
    auto core = std::make_unique<Core>(agreed->topology, std::move(*backend), options.timeout_ns);
    return std::shared_ptr<OneSided>(new OneSided(std::move(core)));
  };
  Result<std::shared_ptr<OneSided>> created =
      create_together(*bootstrap, "OneSided::create", time_to_agree_ns(options.timeout_ns), create_mine);
  if (!created.ok()) {
    const Status status = as_create(created.status());
    log_error(log_rank, status);
    return status;
  }
  const Topology& topology = (*created)->topology();
  log_line(LogLevel::kInfo, log_rank,
           "create: one-sided version={} commit={} backend={} nodes={} ranks_per_node={} heap_bytes={} timeout_s={}",
           version(), commit(), (*created)->backend(), topology.num_nodes(), topology.ranks_per_node,
           (*created)->core_->backend->heap_bytes(),
           static_cast<double>(options.timeout_ns) / static_cast<double>(kNsPerSecond));
  return created;
}

int OneSided::rank() const { return core_->topology.rank; }

int OneSided::num_ranks() const { return core_->topology.num_ranks; }

const Topology& OneSided::topology() const { return core_->topology; }

std::string_view OneSided::backend() const { return core_->backend->name(); }

Team OneSided::world() const { return Team(core_->world); }

Team OneSided::node() const { return Team(core_->node); }

Team OneSided::rail() const { return Team(core_->rail); }

Status OneSided::size_overflow(std::string_view operation, std::size_t count, std::size_t element_bytes) {
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} elements of {} bytes overflow the number of bytes; check the count", operation,
                            count, element_bytes));
}

void* OneSided::peer_pointer(int rank, const void* data) const {
  const bool is_usable = core_->check_usable("peer_pointer", {}).ok();
  if (!is_usable || !core_->check_rank("peer_pointer", rank).ok()) return nullptr;
  const Result<std::size_t> offset = core_->find("peer_pointer", "the address", data, 0);
  std::byte* theirs = core_->backend->peer_heap(rank);
  return offset.ok() && theirs != nullptr ? theirs + *offset : nullptr;
}

namespace {

Status check_local(std::string_view operation, std::string_view what, const void* data, std::size_t num_bytes) {
  if (data != nullptr || num_bytes == 0) return {};
  return Status(ErrorCode::kInvalidArgument,
                fmt::format("{}: {} is null, expected {} bytes of this rank's memory", operation, what, num_bytes));
}

struct CopyArguments {
  std::string_view operation;
  int rank = 0;
  std::size_t num_bytes = 0;
  bool blocking = true;
  Stream stream{};
};

Result<one_sided::PutCall> check_put(const Core& core, const CopyArguments& in, const void* dest, const void* source) {
  if (Status status = core.check_call(in.operation, in.rank, in.stream); !status.ok()) return status;
  const Result<std::size_t> offset = core.find(in.operation, "dest", dest, in.num_bytes);
  if (!offset.ok()) return offset.status();
  if (Status status = check_local(in.operation, "source", source, in.num_bytes); !status.ok()) return status;
  return one_sided::PutCall{in.rank,      *offset,     static_cast<const std::byte*>(source),
                            in.num_bytes, in.blocking, in.stream};
}

Status put_checked(const Core& core, const CopyArguments& in, void* dest, const void* source) {
  const Result<one_sided::PutCall> call = check_put(core, in, dest, source);
  return call.ok() ? core.backend->put(*call) : call.status();
}

Status get_checked(const Core& core, const CopyArguments& in, void* dest, const void* source) {
  if (Status status = core.check_call(in.operation, in.rank, in.stream); !status.ok()) return status;
  const Result<std::size_t> offset = core.find(in.operation, "source", source, in.num_bytes);
  if (!offset.ok()) return offset.status();
  if (Status status = check_local(in.operation, "dest", dest, in.num_bytes); !status.ok()) return status;
  return core.backend->get({in.rank, *offset, static_cast<std::byte*>(dest), in.num_bytes, in.blocking, in.stream});
}

Status put_signal_checked(const Core& core, const CopyArguments& in, void* dest, const void* source,
                          const std::uint64_t* word, std::uint64_t value, SignalOp op) {
  const Result<one_sided::PutCall> put = check_put(core, in, dest, source);
  if (!put.ok()) return put.status();
  const Result<std::size_t> offset = core.find_word(in.operation, word);
  if (!offset.ok()) return offset.status();
  if (Status status = one_sided::check_op(in.operation, op); !status.ok()) return status;
  return core.backend->put_signal(*put, {in.rank, *offset, value, op, in.stream});
}

Result<one_sided::WaitCall> check_wait(const Core& core, std::string_view operation, const std::uint64_t* word,
                                       Comparison comparison, std::uint64_t value, Stream stream) {
  if (Status status = core.check_usable(operation, stream); !status.ok()) return status;
  const Result<std::size_t> offset = core.find_word(operation, word);
  if (!offset.ok()) return offset.status();
  if (comparison < Comparison::kEqual || comparison > Comparison::kLessEqual) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{}: the comparison is {}, expected a value of Comparison",
                                                           operation, static_cast<std::int32_t>(comparison)));
  }
  return one_sided::WaitCall{*offset, comparison, value, core.timeout_ns, stream};
}

}  // namespace

Status OneSided::put(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream) {
  return core_->noted(put_checked(*core_, {"put", rank, num_bytes, true, stream}, dest, source));
}

Status OneSided::put_nbi(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream) {
  return core_->noted(put_checked(*core_, {"put_nbi", rank, num_bytes, false, stream}, dest, source));
}

Status OneSided::get(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream) {
  return core_->noted(get_checked(*core_, {"get", rank, num_bytes, true, stream}, dest, source));
}

Status OneSided::get_nbi(int rank, void* dest, const void* source, std::size_t num_bytes, Stream stream) {
  return core_->noted(get_checked(*core_, {"get_nbi", rank, num_bytes, false, stream}, dest, source));
}

Status OneSided::put_signal(int rank, void* dest, const void* source, std::size_t num_bytes, std::uint64_t* word,
                            std::uint64_t value, SignalOp op, Stream stream) {
  return core_->noted(
      put_signal_checked(*core_, {"put_signal", rank, num_bytes, true, stream}, dest, source, word, value, op));
}

Status OneSided::put_signal_nbi(int rank, void* dest, const void* source, std::size_t num_bytes, std::uint64_t* word,
                                std::uint64_t value, SignalOp op, Stream stream) {
  return core_->noted(
      put_signal_checked(*core_, {"put_signal_nbi", rank, num_bytes, false, stream}, dest, source, word, value, op));
}

Status OneSided::wait_until(const std::uint64_t* word, Comparison comparison, std::uint64_t value, Stream stream,
                            std::int64_t timeout_ns) {
  Result<one_sided::WaitCall> call = check_wait(*core_, "wait_until", word, comparison, value, stream);
  if (!call.ok()) return core_->noted(call.status());
  if (timeout_ns < 0) {
    return core_->noted(
        Status(ErrorCode::kInvalidArgument,
               fmt::format("wait_until: timeout_ns is {}, expected 0 or more nanoseconds", timeout_ns)));
  }
  if (timeout_ns > 0) call->timeout_ns = timeout_ns;
  return core_->noted(core_->backend->wait_until(*call));
}

Result<bool> OneSided::test(const std::uint64_t* word, Comparison comparison, std::uint64_t value) {
  const Result<one_sided::WaitCall> call = check_wait(*core_, "test", word, comparison, value, {});
  return core_->noted(call.ok() ? core_->backend->test(*call) : Result<bool>(call.status()));
}

Status OneSided::fence(int rank, Stream stream) {
  if (Status status = core_->check_call("fence", rank, stream); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->fence(rank, stream));
}

Status OneSided::fence(Stream stream) {
  if (Status status = core_->check_usable("fence", stream); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->fence(kEveryRank, stream));
}

Status OneSided::quiet(Stream stream) {
  if (Status status = core_->check_usable("quiet", stream); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->quiet(kEveryRank, stream));
}

Status OneSided::quiet(int rank, Stream stream) {
  if (Status status = core_->check_call("quiet", rank, stream); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->quiet(rank, stream));
}

Status OneSided::barrier(const Team& team, Stream stream) {
  if (Status status = core_->check_usable("barrier", stream); !status.ok()) return core_->noted(status);
  if (Status status = core_->check_team("barrier", team.state_.get()); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->barrier(*team.state_, stream));
}

Status OneSided::poll_errors() {
  if (Status status = core_->check_usable("poll_errors", {}); !status.ok()) return core_->noted(status);
  return core_->noted(core_->backend->poll_errors());
}

}  // namespace ferry

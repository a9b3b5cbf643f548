/// Calls that all ranks of a team make together, in which each rank sees the arguments of the others.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "ferry/one_sided.hpp"
#include "one_sided/core.hpp"

namespace ferry {
namespace {

using one_sided::Core;
using one_sided::Entry;
using one_sided::TeamState;

enum class Call : std::uint64_t { kAllocate = 1, kFree = 2, kSplit = 3 };

std::string_view name_of(Call call) {
  switch (call) {
    case Call::kAllocate:
      return "allocate";
    case Call::kFree:
      return "free";
    case Call::kSplit:
      return "split";
  }
  return "another call";
}

/// Entry that a rank shows to the others.
struct Record {
  Call call = Call::kAllocate;
  std::uint64_t value = 0;  ///< kAllocate: bytes; kFree: offset; kSplit: this rank's slot for the new team
  std::int64_t colour = 0;
  std::int64_t key = 0;
};
static_assert(sizeof(Record) <= one_sided::kEntryBytes);

/// Values of a kFree of a null pointer and of an address that is not a block: no heap has such offsets.
constexpr std::uint64_t kNothing = ~std::uint64_t{0};
constexpr std::uint64_t kNoBlock = kNothing - 1;

Result<std::vector<Record>> exchange(const Core& core, const TeamState& team, const Record& mine) {
  Entry entry{};
  std::memcpy(entry.data(), &mine, sizeof(mine));
  const Result<std::vector<Entry>> entries = core.backend->exchange(team, entry);
  if (!entries.ok()) return entries.status();
  std::vector<Record> records(entries->size());
  for (std::size_t place = 0; place < records.size(); ++place) {
    std::memcpy(&records[place], (*entries)[place].data(), sizeof(Record));
  }
  for (std::size_t place = 1; place < records.size(); ++place) {
    if (records[place].call == records[0].call) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("ranks disagree: rank {} calls {}, rank {} calls {}; make collective calls in the same "
                              "order on every rank",
                              team.ranks[0], name_of(records[0].call), team.ranks[place], name_of(records[place].call)),
                  team.ranks[place]);
  }
  return records;
}

/// Ok if all ranks passed the same value; `what` names it in the error.
Status check_same(const TeamState& team, const std::vector<Record>& records, std::string_view operation,
                  std::string_view what) {
  const auto text = [&](std::uint64_t value) {
    if (records[0].call == Call::kFree && value == kNothing) return std::string("null");
    if (records[0].call == Call::kFree && value == kNoBlock) return std::string("no block");
    return std::to_string(value);
  };
  for (std::size_t place = 1; place < records.size(); ++place) {
    if (records[place].value == records[0].value) continue;
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: ranks disagree: {} is {} on rank {} and {} on rank {}; it must be the same on every "
                              "rank",
                              operation, what, text(records[0].value), team.ranks[0], text(records[place].value),
                              team.ranks[place]),
                  team.ranks[place]);
  }
  return {};
}

}  // namespace

Result<void*> OneSided::allocate(std::size_t bytes) {
  Core& core = *core_;
  if (Status status = core.check_usable("allocate", {}); !status.ok()) return core.noted(status);
  const Result<std::vector<Record>> records = exchange(core, *core.world, {.call = Call::kAllocate, .value = bytes});
  if (!records.ok()) return core.noted(records.status());
  if (Status same = check_same(*core.world, *records, "allocate", "the number of bytes"); !same.ok())
    return core.noted(same);
  // The block is zeroed already: the heap at its creation, a block when it is freed.
  const std::optional<std::size_t> offset = core.blocks.take(bytes);
  if (offset) return static_cast<void*>(core.heap + *offset);
  return core.noted(
      Status(ErrorCode::kCapacity,
             fmt::format("allocate: {} bytes do not fit: the largest free range of the heap's {} bytes is {}; raise "
                         "OneSidedOptions::heap_bytes",
                         bytes, core.backend->heap_bytes(), core.blocks.largest_free_bytes())));
}

Status OneSided::free(void* data) {
  Core& core = *core_;
  if (Status status = core.check_usable("free", {}); !status.ok()) return core.noted(status);
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(data) - reinterpret_cast<std::uintptr_t>(core.heap);
  const std::size_t num_bytes = core.blocks.size_of(offset);
  const std::uint64_t shown = data == nullptr ? kNothing : num_bytes == 0 ? kNoBlock : offset;
  const Result<std::vector<Record>> records = exchange(core, *core.world, {.call = Call::kFree, .value = shown});
  if (!records.ok()) return core.noted(records.status());
  if (Status same = check_same(*core.world, *records, "free", "the offset of the block"); !same.ok())
    return core.noted(same);
  if (shown == kNothing) return {};
  if (shown == kNoBlock) {
    return core.noted(Status(ErrorCode::kInvalidArgument,
                             fmt::format("free: {} is {}; pass what allocate returned, once", data,
                                         core.blocks.was_freed(offset) ? "in a block that was freed already"
                                                                       : "not the address of a block")));
  }
  // No rank touches the block before the exchange of the call that allocates it again, which this rank joins after
  // this.
  if (Status status = core.backend->zero(offset, num_bytes); !status.ok()) return core.noted(status);
  core.blocks.give(offset);
  return {};
}

Result<Team> OneSided::split(const Team& parent, int colour, int key) {
  Core& core = *core_;
  if (Status status = core.check_usable("split", {}); !status.ok()) return core.noted(status);
  if (Status status = core.check_team("split", parent.state_.get()); !status.ok()) return core.noted(status);
  const TeamState& all = *parent.state_;
  const int my_slot = colour < 0 ? 0 : core.reserve_slot(all);
  const Record mine{Call::kSplit, static_cast<std::uint64_t>(my_slot), colour, key};
  const Result<std::vector<Record>> records = exchange(core, all, mine);
  if (!records.ok()) return core.noted(records.status());
  for (std::size_t place = 0; place < records->size(); ++place) {
    const std::uint64_t slot = (*records)[place].value;
    if (slot <= kMaxTeams) continue;
    return core.noted(
        Status(ErrorCode::kTransport,
               fmt::format("split: rank {} published slot {} for its next team, expected at most {}; run the same "
                           "build on every rank",
                           all.ranks[place], slot, kMaxTeams),
               all.ranks[place]));
  }
  const auto full = std::ranges::find(*records, std::uint64_t{kMaxTeams}, &Record::value);
  if (full != records->end()) {
    const int rank = all.ranks[static_cast<std::size_t>(full - records->begin())];
    return core.noted(Status(
        ErrorCode::kCapacity,
        fmt::format("split: rank {} has used all slots for its {} teams; keep teams and reuse them", rank, kMaxTeams),
        rank));
  }
  if (colour < 0) return Team();
  core.use_slot(all);
  std::vector<std::tuple<std::int64_t, int, int>> members;
  for (std::size_t place = 0; place < records->size(); ++place) {
    const Record& record = (*records)[place];
    if (record.colour == colour) {
      members.emplace_back(record.key, all.ranks[place], static_cast<int>(record.value));
    }
  }
  std::ranges::sort(members);
  std::vector<int> ranks;
  std::vector<int> slots;
  for (const auto& [their_key, rank, slot] : members) {
    ranks.push_back(rank);
    slots.push_back(slot);
  }
  return Team(core.make_team(std::move(ranks), std::move(slots)));
}

Status OneSided::destroy() {
  Core& core = *core_;
  if (Status status = core.check_usable("destroy", {}); !status.ok()) return core.noted(status);
  const Status status = core.backend->leave(*core.world);
  core.destroyed.store(true, std::memory_order_relaxed);
  return core.noted(status);
}

}  // namespace ferry

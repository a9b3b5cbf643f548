/// Files of kernel settings. An accepted file serves each call at most once, with settings that a call may have; a
/// refusal names the place of the fault.

#include <limits>

#include "core/tuning.hpp"
#include "fuzz_target.hpp"

namespace ferry::test {
namespace {

constexpr std::size_t kBytesPerInputByte = 64;
constexpr std::size_t kSmallAllocation = 64 << 10;

bool serves(const TuningEntry& entry, const TunedCall& call) {
  return entry.operation == call.operation && entry.layout == call.layout && entry.staged == call.staged &&
         entry.min_tokens <= call.num_tokens && call.num_tokens <= entry.max_tokens &&
         entry.min_row_bytes <= call.row_bytes && call.row_bytes <= entry.max_row_bytes;
}

void check_call(const TuningTable& table, const TunedCall& call) {
  const TuningEntry* only = nullptr;
  for (const TuningEntry& entry : table.entries) {
    if (!serves(entry, call)) continue;
    require(only == nullptr, "one entry for each call");
    only = &entry;
  }
  const KernelOptions all = tuned({}, table.entries, call);
  const TuningEntry none;
  const TuningEntry& expected = only == nullptr ? none : *only;
  require(all.num_sms == expected.num_sms && all.num_copy_sms == expected.num_copy_sms &&
              all.chunk_tokens == expected.chunk_tokens,
          "a call without own settings takes its entry's");
  const KernelOptions own = tuned({.num_sms = 3, .num_copy_sms = 2, .chunk_tokens = 1}, table.entries, call);
  require(own.num_sms == 3 && own.num_copy_sms == 2 && own.chunk_tokens == 1, "a call's own settings take precedence");
}

void check_table(const TuningTable& table, const std::vector<TuningTable>& all) {
  require(table.num_ranks >= 1 && table.num_nodes >= 1, "a table is for some ranks");
  require(tuning_for(all, table.gpu, table.num_nodes, table.num_ranks).size() == table.entries.size(),
          "a table is found");
  for (const TuningEntry& entry : table.entries) {
    const bool latency =
        entry.operation == Operation::kLatencyDispatch || entry.operation == Operation::kLatencyCombine;
    require(latency || entry.operation == Operation::kDispatch || entry.operation == Operation::kCombine,
            "dispatch or combine, of either mode");
    require(!latency || entry.layout == Layout::kSlab, "latency mode receives in a slab");
    require(table.num_nodes == 1 || entry.num_sms == 0 || entry.num_sms > 2 * (table.num_nodes - 1),
            "as many multiprocessors as an exchange between nodes takes");
    require(entry.min_row_bytes >= 0 && entry.min_row_bytes <= entry.max_row_bytes, "a range of rows");
    require(entry.num_sms >= 0 && entry.num_copy_sms >= 0 && entry.chunk_tokens >= 0, "no negative settings");
    require(entry.min_tokens >= 0 && entry.min_tokens <= entry.max_tokens, "a range of tokens");
    for (const std::int64_t num_tokens : {entry.min_tokens, entry.max_tokens, entry.max_tokens + 1})
      for (const std::int64_t row_bytes : {entry.min_row_bytes, entry.max_row_bytes, entry.max_row_bytes + 1}) {
        check_call(table, {entry.operation, entry.layout, num_tokens, row_bytes, entry.staged});
      }
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  const AllocationWatch watch;
  const Result<std::vector<TuningTable>> tables = parse_tuning(text, "FILE");
  require(watch.largest_bytes() <= kSmallAllocation + kBytesPerInputByte * input.size(),
          "memory is allocated only in proportion to the input");
  if (!tables.ok()) {
    require_refusal(tables.status(), ErrorCode::kInvalidArgument);
    const std::string_view message = tables.status().message();
    require(message.find("tuning file FILE: ") != std::string_view::npos, "a refusal names the file");
    for (const char c : message) require(c >= ' ' && c <= '~', "a refusal is plain text");
    return;
  }
  for (const TuningTable& table : *tables) check_table(table, *tables);
}

}  // namespace ferry::test

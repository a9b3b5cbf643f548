#include "support/growth_watch.hpp"

#include <fmt/format.h>

#include "support/sanitizers.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kMeetTimeoutNs = 40 * kNsPerSecond;

/// Limits of a process's growth between the first measurement and any later one; the group's own counts, descriptors
/// and file mappings may not grow at all. Operator new: growth of vectors (some 30 KiB measured, over all ranks if they
/// are threads, and none after that); a leak of the smallest block per call would be 190 KiB. The C library's heap also
/// holds UCX's buffers, which vary (some 110 KiB measured). Resident memory also includes fragments between blocks, and
/// freed blocks in the allocator's thread caches (some 500 KiB measured); it covers memory off the heap, and C code
/// where the heap is not measured. Other mappings: the allocator may still start an arena for a thread, which has two
/// mappings.
constexpr std::size_t kSpareNewBytes = std::size_t{64} << 10;
constexpr std::size_t kSpareHeapBytes = std::size_t{160} << 10;
constexpr std::size_t kSpareResidentBytes = std::size_t{1} << 20;
constexpr std::size_t kSpareMappings = 4;

}  // namespace

bool GrowthWatch::meet() {
  return context_.expect_ok(context_.bootstrap()->all_gather({}, kMeetTimeoutNs).status(), "meeting to sample");
}

bool GrowthWatch::take_stock(int num_calls) {
  if (!meet()) return false;
  num_calls_ = num_calls;
  Holdings now;
  now.group = group_.memory_usage();
  if (measures_process_) now.process = process_usage();
  if (!warm_) warm_ = now;
  expect_no_growth("bytes held by the group", now.group.total_bytes(), warm_->group.total_bytes(), 0);
  expect_no_growth("descriptors", now.process.num_descriptors, warm_->process.num_descriptors, 0);
  expect_no_growth("mappings of files", now.process.num_file_mappings, warm_->process.num_file_mappings, 0);
  // A sanitizer keeps freed memory, and maps memory for its own bookkeeping.
  if (!kSanitized) {
    expect_no_growth("mappings", now.process.num_mappings, warm_->process.num_mappings, kSpareMappings);
    expect_no_growth("bytes of operator new", now.process.new_bytes, warm_->process.new_bytes, kSpareNewBytes);
    expect_no_growth("bytes of heap", now.process.heap_bytes, warm_->process.heap_bytes, kSpareHeapBytes);
    expect_no_growth("resident bytes", now.process.resident_bytes, warm_->process.resident_bytes, kSpareResidentBytes);
  }
  return meet();
}

void GrowthWatch::expect_no_growth(std::string_view what, std::size_t now, std::size_t warm, std::size_t spare) {
  context_.expect(now <= warm + spare,
                  fmt::format("after {} calls: {} {}, expected at most {} more than the {} when warm", num_calls_, now,
                              what, spare, warm));
}

}  // namespace ferry::test

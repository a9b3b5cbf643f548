#include "cpu/rows/row_copy.hpp"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ferry::cpu {
namespace {

/// Batches above this size are evicted from the caches before they are used: about a core's share of a server's
/// last-level cache. (Measured by benchmarks: below it cached stores win, because the receiver reads the rows from the
/// cache.)
constexpr std::int64_t kStreamingThresholdBytes = std::int64_t{4} << 20;

}  // namespace

CopyMode choose_copy_mode(std::int64_t written_bytes) {
  return written_bytes > kStreamingThresholdBytes ? CopyMode::kStreaming : CopyMode::kCached;
}

#if defined(__SSE2__)

void copy_row(std::byte* to, const std::byte* from, std::size_t bytes, CopyMode mode) {
  if (mode == CopyMode::kCached) {
    std::memcpy(to, from, bytes);
    return;
  }
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const std::size_t num_vectors = bytes / sizeof(__m128i);
  std::size_t i = 0;
  for (; i + 4 <= num_vectors; i += 4) {
    const __m128i a = _mm_load_si128(source + i);
    const __m128i b = _mm_load_si128(source + i + 1);
    const __m128i c = _mm_load_si128(source + i + 2);
    const __m128i d = _mm_load_si128(source + i + 3);
    _mm_stream_si128(target + i, a);
    _mm_stream_si128(target + i + 1, b);
    _mm_stream_si128(target + i + 2, c);
    _mm_stream_si128(target + i + 3, d);
  }
  for (; i < num_vectors; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
}

void finish_copies(CopyMode mode) {
  if (mode == CopyMode::kStreaming) _mm_sfence();
}

#else

void copy_row(std::byte* to, const std::byte* from, std::size_t bytes, CopyMode) { std::memcpy(to, from, bytes); }
void finish_copies(CopyMode) {}

#endif

}  // namespace ferry::cpu

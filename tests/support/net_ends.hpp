#ifndef FERRY_TESTS_NET_ENDS_HPP
#define FERRY_TESTS_NET_ENDS_HPP

/// Ends of one network in one thread, polled in turn by the test, with the events of each.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "net/engine.hpp"

namespace ferry::test {

/// Suffix of an engine's name: its ends start receivers (EngineOptions::may_start_receiver).
inline constexpr std::string_view kWithReceivers = "_with_receivers";
bool has_receivers(std::string_view name);

/// Engine of this name, with or without the suffix.
const net::EngineFactory& net_engine(std::string_view name);

struct NetEnd {
  std::vector<std::byte> owned;
  std::vector<std::byte> owned_gpu;  // stands for GPU memory
  std::span<std::byte> gpu;          // `owned_gpu` without the engine's words
  std::span<std::byte> memory;       // `owned`, or the engine's memory
  net::EngineOptions options;
  std::unique_ptr<net::Engine> engine;  // null once destroyed
  /// Every value received, in order of arrival, by (peer, channel).
  std::map<std::pair<int, int>, std::vector<std::uint64_t>> heard;
  std::map<int, Status> lost;
  std::map<std::uint64_t, std::uint64_t> completed;  // values, by ticket
  int num_lost_events = 0;
  /// Called after each event above is noted, to check memory at that moment.
  std::function<void(int peer, int channel, std::uint64_t value)> on_notified;
  std::function<void()> on_lost;

  std::uint64_t highest(int peer, int channel) const;
};

struct NetShape {
  int num_ends = 2;
  int num_channels = 1;
  std::size_t memory_bytes = 1 << 16;
  bool engine_allocates = false;
  std::size_t gpu_bytes = 0;  ///< EngineOptions::gpu_memory, in host memory
  bool read_back_gpu_writes = false;
  std::int64_t timeout_ns = 10'000'000'000;
  /// Host of each end, as the ends believe. Empty: the ends have no information about hosts.
  std::vector<int> hosts{};
};

class NetEnds {
 public:
  /// Creates the ends without connecting them.
  NetEnds(std::string_view engine, const NetShape& shape);
  /// Closes all ends at once, as the ranks of a group do.
  ~NetEnds();
  NetEnds(const NetEnds&) = delete;
  NetEnds& operator=(const NetEnds&) = delete;

  std::vector<net::Blob> addresses() const;
  /// Connects all ends, each with all addresses. Throws if one refuses.
  void connect();
  Status connect(int end, const std::vector<net::Blob>& addresses);

  NetEnd& operator[](int end) { return *ends_[static_cast<std::size_t>(end)]; }
  int size() const { return static_cast<int>(ends_.size()); }

  /// Polls every open end once.
  bool poll();
  /// Polls until `done`; returns false after half a minute.
  bool poll_until(const std::function<bool()>& done);
  /// Closes these ends at the same time, each in its own thread, while it polls the others.
  void close(const std::vector<int>& ends);

 private:
  std::vector<std::unique_ptr<NetEnd>> ends_;
};

/// `count` bytes that depend on the seed and on their position.
std::vector<std::byte> net_pattern(std::size_t count, std::uint64_t seed);

}  // namespace ferry::test

#endif  // FERRY_TESTS_NET_ENDS_HPP

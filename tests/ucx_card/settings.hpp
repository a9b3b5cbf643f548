#ifndef FERRY_TESTS_UCX_CARD_SETTINGS_HPP
#define FERRY_TESTS_UCX_CARD_SETTINGS_HPP

/// Behaviour of the stand-in card, from FERRY_UCX_CARD: "name=number" separated by commas, read by each new context.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ferry::ucx_card {

/// Functions that can be made to fail: fail=<name> (README.md).
enum class Call {
  kInit,
  kMap,
  kMapGpu,
  kPack,
  kWorker,
  kEndpoint,
  kUnpack,
  kPut,
  kPutGpu,
  kGet,
  kFlush,
  kMessage,
  kClose,
  kFence
};
inline constexpr std::array<std::string_view, 14> kCallNames{"init",     "map",     "map_gpu", "pack",    "worker",
                                                             "endpoint", "unpack",  "put",     "put_gpu", "get",
                                                             "flush",    "message", "close",   "fence"};

struct Settings {
  std::uint64_t seed = 1;
  std::uint64_t latency_ns = 0;        ///< maximum delay of each piece, message and completion
  std::uint64_t write_latency_ns = 0;  ///< further delay of the bytes of puts
  std::uint64_t close_latency_ns = 0;  ///< until the close of an endpoint completes
  std::uint64_t piece_bytes = 4096;
  std::uint64_t gpu_lag = 0;  ///< 1: flushed writes stay invisible to the GPU until a card reads from its memory
  std::uint64_t gpu = 0;      ///< 1: memory of GPUs is that of real ones (gpu_copies.hpp)
  std::uint64_t steady = 0;   ///< 1: all delays are as long as latency_ns, and bytes go in the order of their puts
  std::uint64_t rate = 0;     ///< bytes per microsecond that an end sends and receives at most; 0: no limit
  std::uint64_t on_time = 0;  ///< 1: with `steady`, GPUs that copy the bytes of puts show none before they arrive
  std::uint64_t spin = 0;     ///< 1: threads do not sleep, neither the card's nor those that wait for its locks
  std::uint64_t thread = 1;   ///< 0: an end has no thread, and the progress of its workers does all
  std::uint64_t cards = 1;    ///< cards of an endpoint; 0: peers are reached by tcp alone

  std::uint64_t fail = kCallNames.size();  ///< index into kCallNames: the call that fails
  std::uint64_t fail_at = 1;               ///< the how-manieth such call of the context, from 1
  std::uint64_t status = 3;                ///< ucs_status_t that it fails with, without its sign
  std::uint64_t now = 0;                   ///< 1: the call itself returns the status; 0: its completion does
  std::uint64_t end = kEveryEnd;           ///< index of the only context that fails, in order of creation

  static constexpr std::uint64_t kEveryEnd = ~std::uint64_t{0};

  static Settings from_environment();
  /// Settings in `text`. Unknown names and malformed numbers end the process: a test would test nothing.
  static Settings from(std::string_view text);
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_SETTINGS_HPP

/// Makes the test program that contains it load the stand-in card in place of UCX.

#include <cstdlib>

namespace ferry::test {
namespace {

/// Runs before main. Variables that are set stay, so that a test can be repeated by hand with another card.
[[maybe_unused]] const bool is_set = [] {
  setenv("FERRY_UCX_LIBRARY", FERRY_UCX_CARD_FOLDER, 0);
  // Ends of other hosts then put by cards, as where /sys/class/infiniband lists some.
  setenv("UCX_TLS", "rc,cuda_copy", 0);
  // Bytes and messages in any order, within a fraction of a millisecond.
  setenv("FERRY_UCX_CARD", "seed=7,latency_ns=200000,piece_bytes=64", 0);
  return true;
}();

}  // namespace
}  // namespace ferry::test

/// Replaces raw_exchange.cu in a build without the CUDA backend.

#include "bench/raw_exchange.hpp"

namespace ferry::tools {

namespace {

Status absent() { return {ErrorCode::kUnsupported, "this build has no CUDA backend"}; }

}  // namespace

Status raw_push(const RawExchangeParams&, int, Stream) { return absent(); }
Status raw_pull(const RawExchangeParams&, int, Stream) { return absent(); }
Status raw_flag_rounds(const RawFlagParams&, Stream) { return absent(); }

}  // namespace ferry::tools

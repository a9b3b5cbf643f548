#ifndef FERRY_CORE_QUANTIZED_DISPATCH_HPP
#define FERRY_CORE_QUANTIZED_DISPATCH_HPP

/// A dispatch that quantises is two steps: this rank's rows are quantised into staging memory, then an ordinary
/// dispatch sends what lies there. The backend takes the memory, and quantises where its calls run.

#include <cstddef>

#include "core/backend.hpp"
#include "numeric/quantize.hpp"

namespace ferry {

struct QuantizedDispatch {
  numeric::QuantizeParams quantize;  ///< the first step
  DispatchCall send;                 ///< the second
};

/// Staging that the call needs: rows, then their scales, without gaps.
std::size_t quantized_bytes(const DispatchCall& call);

/// The steps of `call`, which quantises. `staging` has quantized_bytes(call), aligned to kRowGranuleBytes.
QuantizedDispatch split_quantized(const DispatchCall& call, std::byte* staging);

}  // namespace ferry

#endif  // FERRY_CORE_QUANTIZED_DISPATCH_HPP

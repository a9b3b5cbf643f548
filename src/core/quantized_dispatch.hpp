#ifndef FERRY_CORE_QUANTIZED_DISPATCH_HPP
#define FERRY_CORE_QUANTIZED_DISPATCH_HPP

/// The two steps of a dispatch that quantises: this rank's rows are quantised into staging memory, then an ordinary
/// dispatch sends them from there. The backend provides the memory, and quantises on the device of its calls.

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

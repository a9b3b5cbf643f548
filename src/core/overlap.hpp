#ifndef FERRY_CORE_OVERLAP_HPP
#define FERRY_CORE_OVERLAP_HPP

/// Overlap of tensors of one call in memory. Addresses are only compared, never read, so they may belong to a GPU.

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "core/backend.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Bytes that a tensor occupies, for comparison with other tensors.
class Footprint {
 public:
  Footprint() = default;  ///< of no bytes
  Footprint(std::string_view name, const ConstRows& rows);
  Footprint(std::string_view name, const Rows& rows);
  /// Any strides from 0; empty if the view is absent. Three dimensions count as everything from the first byte to the
  /// last, unless they can be written as two, or the last two of them have no gaps.
  template <typename Pointer>
  Footprint(std::string_view name, const BasicTensorView<Pointer>& view) : name_(name) {
    if (view.present()) set(view);  // most are absent
  }

  std::string_view name() const { return name_; }
  std::uintptr_t begin() const { return begin_; }
  std::uintptr_t end() const { return end_; }

  /// Whether any byte belongs to both. Exact: tensors whose rows alternate in memory do not overlap.
  bool overlaps(const Footprint& other) const {
    return begin_ < other.end_ && other.begin_ < end_ && pieces_overlap(other);
  }
  /// Whether both are the same rows at the same addresses.
  bool same_as(const Footprint& other) const;

 private:
  struct Dimension {
    std::int64_t extent = 0;
    std::int64_t stride_bytes = 0;
  };
  Footprint(std::string_view name, const void* data, Dimension rows, Dimension columns, std::int64_t element_bytes);
  void set(const ConstTensorView& view);
  /// Shortcut for memory without gaps, which most tensors have.
  bool set_whole(const void* data, std::int64_t num_pieces, std::int64_t piece_bytes);
  bool pieces_overlap(const Footprint& other) const;

  std::string_view name_;
  std::uintptr_t begin_ = 0;
  std::uintptr_t end_ = 0;
  /// Pieces of `piece_bytes_`, evenly spaced in two dimensions; the inner one has more than one piece only if the
  /// tensor's elements are spaced apart in both dimensions.
  std::int64_t piece_bytes_ = 0;
  Dimension pieces_;
  Dimension inner_;
};

/// No output may share memory with an input or another output. An input in `may_be_output` may be exactly the first
/// output, row by row.
/// @errors kInvalidArgument: names both tensors and their addresses
Status check_overlap(std::string_view operation, std::span<const Footprint> outputs, std::span<const Footprint> inputs,
                     std::span<const Footprint> may_be_output = {});

}  // namespace ferry

#endif  // FERRY_CORE_OVERLAP_HPP

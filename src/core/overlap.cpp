#include "core/overlap.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace ferry {
namespace {

/// Type for products: strides and extents are checked one by one, and their product may exceed 64 bits.
__extension__ using Wide = __int128;

/// Evenly spaced pieces of memory.
struct Comb {
  std::uintptr_t begin = 0;
  std::int64_t num_pieces = 0;
  std::int64_t piece_bytes = 0;
  std::int64_t stride_bytes = 0;
};

std::uintptr_t step(std::uintptr_t begin, std::int64_t count, std::int64_t stride_bytes) {
  return begin + static_cast<std::uintptr_t>(count) * static_cast<std::uintptr_t>(stride_bytes);
}

/// Precondition: both have the same stride, or one has a single piece.
bool overlap_at_one_stride(const Comb& a, const Comb& b) {
  const Wide stride = std::max<std::int64_t>(a.num_pieces > 1 ? a.stride_bytes : b.stride_bytes, 1);
  // Pieces i of a and j of b overlap if low < (i - j) * stride < high.
  const Wide distance = static_cast<Wide>(b.begin) - static_cast<Wide>(a.begin);
  const Wide low = distance - a.piece_bytes;
  const Wide high = distance + b.piece_bytes;
  const Wide floor = low / stride - (low % stride < 0 ? 1 : 0);
  const Wide steps = std::max<Wide>(floor + 1, 1 - static_cast<Wide>(b.num_pieces));
  return steps <= a.num_pieces - 1 && steps * stride < high;
}

bool overlap(const Comb& a, const Comb& b) {
  if (a.num_pieces == 1 || b.num_pieces == 1 || a.stride_bytes == b.stride_bytes) return overlap_at_one_stride(a, b);
  const Comb& fewer = a.num_pieces <= b.num_pieces ? a : b;
  const Comb& more = a.num_pieces <= b.num_pieces ? b : a;
  for (std::int64_t i = 0; i < fewer.num_pieces; ++i) {
    const Comb piece{step(fewer.begin, i, fewer.stride_bytes), 1, fewer.piece_bytes, 0};
    if (overlap_at_one_stride(piece, more)) return true;
  }
  return false;
}

}  // namespace

inline bool Footprint::set_whole(const void* data, std::int64_t num_pieces, std::int64_t piece_bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  std::int64_t bytes = 0;
  std::uintptr_t end = 0;
  if (data == nullptr || num_pieces <= 0 || piece_bytes <= 0 ||
      __builtin_mul_overflow(num_pieces, piece_bytes, &bytes) || __builtin_add_overflow(begin, bytes, &end)) {
    return false;
  }
  begin_ = begin;
  end_ = end;
  piece_bytes_ = bytes;
  pieces_ = inner_ = {1, 0};
  return true;
}

Footprint::Footprint(std::string_view name, const ConstRows& rows) : name_(name) {
  if (rows.data == nullptr) return;
  if (rows.stride_bytes == rows.row_bytes && set_whole(rows.data, rows.num_rows, rows.row_bytes)) return;
  *this = Footprint(name, rows.data, {rows.num_rows, rows.stride_bytes}, {1, 0}, rows.row_bytes);
}

Footprint::Footprint(std::string_view name, const Rows& rows)
    : Footprint(name, ConstRows{rows.data, rows.num_rows, rows.row_bytes, rows.stride_bytes, rows.dtype}) {}

void Footprint::set(const ConstTensorView& view) {
  if (view.num_dims < 1 || view.num_dims > kMaxTensorDims) return;
  const std::string_view name = name_;
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(view.dtype));
  const bool is_whole = view.num_dims == 2 && view.stride(1) == 1 && view.stride(0) == view.extent(1);
  if (is_whole && set_whole(view.data, view.extent(0), view.extent(1) * element_bytes)) return;
  if (view.num_dims == kMaxTensorDims) {
    if (view.num_elements() == 0) return;
    const bool evenly_spaced = view.extent(0) == 1 || view.stride(0) == view.extent(1) * view.stride(1);
    if (evenly_spaced) {
      *this = Footprint(name, view.data, {view.extent(0) * view.extent(1), view.stride(1) * element_bytes},
                        {view.extent(2), view.stride(2) * element_bytes}, element_bytes);
      return;
    }
    const bool rows_touch = view.stride(2) == 1 && view.stride(1) == view.extent(2);
    const bool columns_touch = view.stride(1) == 1 && view.stride(2) == view.extent(1);
    if (rows_touch || columns_touch) {
      *this = Footprint(name, view.data, {view.extent(0), view.stride(0) * element_bytes}, {1, 0},
                        view.extent(1) * view.extent(2) * element_bytes);
      return;
    }
    Wide bytes = element_bytes;
    for (int dim = 0; dim < view.num_dims; ++dim) {
      bytes += static_cast<Wide>(view.extent(dim) - 1) * view.stride(dim) * element_bytes;
    }
    *this = Footprint(name, view.data, {1, 0}, {1, 0},
                      static_cast<std::int64_t>(std::min<Wide>(bytes, std::numeric_limits<std::int64_t>::max())));
    return;
  }
  const Dimension first{view.extent(0), view.stride(0) * element_bytes};
  const Dimension second =
      view.num_dims == 2 ? Dimension{view.extent(1), view.stride(1) * element_bytes} : Dimension{1, 0};
  *this = Footprint(name, view.data, first, second, element_bytes);
}

Footprint::Footprint(std::string_view name, const void* data, Dimension rows, Dimension columns,
                     std::int64_t element_bytes)
    : name_(name) {
  if (data == nullptr || rows.extent <= 0 || columns.extent <= 0) return;
  for (Dimension* dimension : {&rows, &columns}) {
    if (dimension->stride_bytes == 0) dimension->extent = 1;  // the same bytes again and again
    if (dimension->extent == 1) dimension->stride_bytes = 0;
  }
  begin_ = reinterpret_cast<std::uintptr_t>(data);
  piece_bytes_ = element_bytes;
  // Adjacent elements form one piece: those of a row, or of a column in a transposed tensor.
  if (rows.extent == 1 || rows.stride_bytes == element_bytes) std::swap(rows, columns);
  if (columns.stride_bytes == element_bytes) {
    piece_bytes_ *= columns.extent;
    columns = {1, 0};
    if (rows.stride_bytes == piece_bytes_) {
      piece_bytes_ *= rows.extent;
      rows = {1, 0};
    }
  }
  pieces_ = rows;
  inner_ = columns;
  const Wide end = static_cast<Wide>(begin_) + static_cast<Wide>(pieces_.extent - 1) * pieces_.stride_bytes +
                   static_cast<Wide>(inner_.extent - 1) * inner_.stride_bytes + piece_bytes_;
  end_ = static_cast<std::uintptr_t>(std::min<Wide>(end, std::numeric_limits<std::uintptr_t>::max()));
}

bool Footprint::pieces_overlap(const Footprint& other) const {
  for (std::int64_t i = 0; i < inner_.extent; ++i) {
    const Comb mine{step(begin_, i, inner_.stride_bytes), pieces_.extent, piece_bytes_, pieces_.stride_bytes};
    for (std::int64_t j = 0; j < other.inner_.extent; ++j) {
      const Comb theirs{step(other.begin_, j, other.inner_.stride_bytes), other.pieces_.extent, other.piece_bytes_,
                        other.pieces_.stride_bytes};
      if (overlap(mine, theirs)) return true;
    }
  }
  return false;
}

bool Footprint::same_as(const Footprint& other) const {
  const auto equal = [](const Dimension& a, const Dimension& b) {
    return a.extent == b.extent && a.stride_bytes == b.stride_bytes;
  };
  return begin_ == other.begin_ && piece_bytes_ == other.piece_bytes_ && equal(pieces_, other.pieces_) &&
         equal(inner_, other.inner_);
}

Status check_overlap(std::string_view operation, std::span<const Footprint> outputs, std::span<const Footprint> inputs,
                     std::span<const Footprint> may_be_output) {
  const auto refuse = [&](const Footprint& a, const Footprint& b, std::string_view hint) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("{}: {} (addresses {:#x} to {:#x}) shares memory with {} ({:#x} to {:#x}); give each "
                              "memory of its own{}",
                              operation, a.name(), a.begin(), a.end(), b.name(), b.begin(), b.end(), hint));
  };
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Footprint& output = outputs[i];
    if (output.begin() == output.end()) continue;  // empty, as for most tensors, which are not used
    for (const Footprint& other : outputs.subspan(i + 1)) {
      if (output.overlaps(other)) return refuse(output, other, "");
    }
    for (const Footprint& input : inputs) {
      if (output.overlaps(input)) return refuse(output, input, "");
    }
    for (const Footprint& input : may_be_output) {
      if (!output.overlaps(input) || (i == 0 && output.same_as(input))) continue;
      return refuse(output, input, i == 0 ? ", or the same address and row stride" : "");
    }
  }
  return {};
}

}  // namespace ferry

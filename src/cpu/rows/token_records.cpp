#include "cpu/rows/token_records.hpp"

#include <algorithm>
#include <cstring>

#include "plan/checksum_table.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

/// Copies `count` elements with any strides.
template <typename Word>
void copy_strided_as(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride,
                     std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride * static_cast<std::int64_t>(sizeof(Word)),
                from + i * from_stride * static_cast<std::int64_t>(sizeof(Word)), sizeof(Word));
  }
}

struct StridedElements {
  const std::byte* from = nullptr;
  std::int64_t from_stride = 1;
  std::byte* to = nullptr;
  std::int64_t to_stride = 1;
  std::int64_t count = 0;
  std::size_t element_bytes = 1;
};

void copy_strided(const StridedElements& copy) {
  if (copy.from_stride == 1 && copy.to_stride == 1) {
    std::memcpy(copy.to, copy.from, to_size(copy.count) * copy.element_bytes);
  } else if (copy.element_bytes == 1) {
    copy_strided_as<std::uint8_t>(copy.from, copy.from_stride, copy.to, copy.to_stride, copy.count);
  } else {
    copy_strided_as<std::uint32_t>(copy.from, copy.from_stride, copy.to, copy.to_stride, copy.count);
  }
}

/// Row `row` of scales with shape [rows, S] or [L, C, S].
StridedElements scale_row(const TensorView& scales, std::int64_t row) {
  const int last = scales.num_dims - 1;
  std::int64_t element = row * scales.stride(last - 1);
  if (scales.num_dims == kMaxTensorDims) {
    const std::int64_t capacity = scales.extent(1);
    element = row / capacity * scales.stride(0) + row % capacity * scales.stride(1);
  }
  StridedElements elements;
  elements.element_bytes = size_bytes(scales.dtype);
  elements.to = static_cast<std::byte*>(scales.data) + element * static_cast<std::int64_t>(elements.element_bytes);
  elements.to_stride = scales.stride(last);
  elements.count = scales.extent(last);
  return elements;
}

/// Unpacks rows one after another.
class Unpacker {
 public:
  Unpacker(const DispatchCall& call, const CpuRouting& routing, const plan::TokenRecord& format)
      : call_(call), routing_(routing), format_(format), num_topk_(to_size(routing.num_topk)) {}

  void scales(const std::byte* record, std::int64_t row) const {
    const TensorView& out = call_.out_scales;
    if (!out.present()) return;
    StridedElements elements = scale_row(out, row);
    elements.from = record;
    copy_strided(elements);
  }

  /// kTokens: writes all K entries of the token and blanks those of other ranks.
  void token_entries(const std::byte* record, std::int64_t row) const {
    const TensorView& out_ids = call_.out_topk_idx;
    auto* out_weights = static_cast<float*>(call_.out_topk_weights.data);
    if (!out_ids.present() && !call_.out_topk_weights.present()) return;
    for (std::size_t topk = 0; topk < num_topk_; ++topk) {
      const std::int32_t expert = id(record, topk);
      // Ids arrive from other ranks: check them before indexing the table.
      const bool known = expert >= 0 && expert < routing_.num_experts;
      const std::int32_t local = known ? routing_.local_expert[to_size(expert)] : -1;
      const std::size_t entry = to_size(row) * num_topk_ + topk;
      if (out_ids.present() && out_ids.dtype == DType::kInt32) {
        static_cast<std::int32_t*>(out_ids.data)[entry] = local;
      } else if (out_ids.present()) {
        static_cast<std::int64_t*>(out_ids.data)[entry] = local;
      }
      if (out_weights != nullptr) out_weights[entry] = local < 0 ? 0.0F : weight(record, topk);
    }
  }

  /// kExperts, kSlab: writes the weight of the row's expert; weights of duplicates are added in k order.
  void expert_weight(const std::byte* record, std::int64_t row, std::int32_t expert) const {
    if (!call_.out_topk_weights.present()) return;
    float sum = 0.0F;
    bool found = false;
    for (std::size_t topk = 0; topk < num_topk_; ++topk) {
      if (id(record, topk) != expert) continue;
      sum = found ? sum + weight(record, topk) : weight(record, topk);
      found = true;
    }
    static_cast<float*>(call_.out_topk_weights.data)[row] = sum;
  }

 private:
  std::int32_t id(const std::byte* record, std::size_t topk) const {
    std::int32_t value = 0;
    std::memcpy(&value, record + format_.ids_offset() + topk * sizeof(value), sizeof(value));
    return value;
  }
  float weight(const std::byte* record, std::size_t topk) const {
    float value = 0;
    std::memcpy(&value, record + format_.weights_offset() + topk * sizeof(value), sizeof(value));
    return value;
  }

  const DispatchCall& call_;
  const CpuRouting& routing_;
  plan::TokenRecord format_;
  std::size_t num_topk_;
};

/// Calls fn(first row, end row) for each run of rows without a token.
template <typename Function>
void for_each_gap(const CpuRouting& routing, Function&& fn) {
  std::int64_t row = 0;
  while (row < routing.num_recv_rows) {
    const auto empty = [&routing](std::int64_t r) {
      return r >= routing.num_used_rows || routing.source_table[to_size(r) * 2] < 0;
    };
    if (!empty(row)) {
      ++row;
      continue;
    }
    const std::int64_t begin = row;
    while (row < routing.num_recv_rows && empty(row)) ++row;
    fn(begin, row);
  }
}

void clear_rows(const DispatchCall& call, const CpuRouting& routing, std::int64_t begin, std::int64_t end) {
  const std::int64_t weights_per_row = routing.layout == Layout::kTokens ? routing.num_topk : 1;
  if (call.out_topk_weights.present()) {
    auto* weights = static_cast<float*>(call.out_topk_weights.data);
    std::fill(weights + begin * weights_per_row, weights + end * weights_per_row, 0.0F);
  }
  constexpr std::uint32_t kZero = 0;
  for (std::int64_t row = begin; row < end; ++row) {
    std::memset(call.out_x.row(row), 0, to_size(call.out_x.row_bytes));
    if (!call.out_scales.present()) continue;
    StridedElements elements = scale_row(call.out_scales, row);
    elements.from = reinterpret_cast<const std::byte*>(&kZero);
    elements.from_stride = 0;
    copy_strided(elements);
  }
}

void fill_unused_ids(const TensorView& ids, std::int64_t num_used_rows) {
  if (!ids.present()) return;
  const std::int64_t begin = num_used_rows * ids.extent(1);
  const std::int64_t end = ids.num_elements();
  if (begin == end) return;
  if (ids.dtype == DType::kInt32) {
    std::fill(static_cast<std::int32_t*>(ids.data) + begin, static_cast<std::int32_t*>(ids.data) + end, -1);
  } else {
    std::fill(static_cast<std::int64_t*>(ids.data) + begin, static_cast<std::int64_t*>(ids.data) + end,
              std::int64_t{-1});
  }
}

}  // namespace

plan::TokenRecord record_format(const DispatchCall& call, bool verify) {
  const bool weights = call.out_topk_weights.present();
  const bool ids = weights || call.out_topk_idx.present();
  const std::int64_t scale_bytes =
      call.scales.present() ? call.scales.extent(1) * static_cast<std::int64_t>(size_bytes(call.scales.dtype)) : 0;
  plan::TokenRecord format = plan::TokenRecord::of({scale_bytes, call.routing->num_topk, ids, weights, false});
  if (verify) format.num_words += plan::kChecksumWords;
  return format;
}

void pack_records(const DispatchCall& call, const CpuRouting& routing, const plan::TokenRecord& format, std::byte* to) {
  const std::size_t record_bytes = to_size(format.size_bytes());
  const auto num_topk = to_size(routing.num_topk);
  const bool weights = call.out_topk_weights.present();
  const bool ids = weights || call.out_topk_idx.present();
  const auto* weight_table = static_cast<const float*>(call.topk_weights.data);
  for (std::size_t token = 0; token < to_size(routing.num_tokens); ++token, to += record_bytes) {
    if (call.scales.present()) {
      const auto element_bytes = static_cast<std::int64_t>(size_bytes(call.scales.dtype));
      const auto* row = static_cast<const std::byte*>(call.scales.data) +
                        static_cast<std::int64_t>(token) * call.scales.stride(0) * element_bytes;
      copy_strided({row, call.scales.stride(1), to, 1, call.scales.extent(1), to_size(element_bytes)});
    }
    for (std::size_t topk = 0; ids && topk < num_topk; ++topk) {
      const auto expert = static_cast<std::int32_t>(routing.ids[token * num_topk + topk]);
      std::memcpy(to + format.ids_offset() + topk * sizeof(expert), &expert, sizeof(expert));
    }
    if (weights) std::memcpy(to + format.weights_offset(), weight_table + token * num_topk, num_topk * sizeof(float));
  }
}

const std::byte* record_of_row(std::int64_t row, const CpuRouting& routing, std::size_t record_bytes,
                               std::span<const RecordSource> sources) {
  const std::int32_t source = routing.source_table[to_size(row) * 2];
  if (source < 0) return nullptr;
  const RecordSource& from = sources[to_size(source)];
  const std::int32_t record =
      from.record_of_row != nullptr ? from.record_of_row[row] : routing.source_table[to_size(row) * 2 + 1];
  return from.records + to_size(record) * record_bytes;
}

void unpack_records(const DispatchCall& call, const CpuRouting& routing, const plan::TokenRecord& format,
                    std::span<const RecordSource> sources) {
  const Unpacker unpacker(call, routing, format);
  const auto record_of = [&, record_bytes = to_size(format.size_bytes())](std::int64_t row) {
    return record_of_row(row, routing, record_bytes, sources);
  };
  if (routing.layout == Layout::kTokens) {
    for (std::int64_t row = 0; row < routing.num_used_rows; ++row) {
      const std::byte* record = record_of(row);
      unpacker.scales(record, row);
      unpacker.token_entries(record, row);
    }
    return;
  }
  for (std::size_t local = 0; local < routing.local_expert_ids.size(); ++local) {
    const std::int64_t begin = routing.expert_row_offsets[local];
    const std::int64_t end = begin + routing.num_rows_per_local_expert[local];
    for (std::int64_t row = begin; row < end; ++row) {
      const std::byte* record = record_of(row);
      unpacker.scales(record, row);
      unpacker.expert_weight(record, row, routing.local_expert_ids[local]);
    }
  }
}

void fill_local_outputs(const DispatchCall& call, const CpuRouting& routing) {
  if (call.out_source.present() && call.out_source.num_elements() > 0) {
    auto* source = static_cast<std::int32_t*>(call.out_source.data);
    std::copy(routing.source_table.begin(), routing.source_table.end(), source);
    std::fill(source + routing.source_table.size(), source + call.out_source.num_elements(), -1);
  }
  fill_unused_ids(call.out_topk_idx, routing.num_used_rows);
  if (!call.zero_padding) return;
  for_each_gap(routing, [&](std::int64_t begin, std::int64_t end) { clear_rows(call, routing, begin, end); });
}

}  // namespace ferry::cpu

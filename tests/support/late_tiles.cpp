#include "support/late_tiles.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace ferry::test {
namespace {

/// Ample for a call to begin on an idle machine. A slower call only finds the tiles finished.
constexpr std::chrono::milliseconds kLate{2};
/// Written over rows that are not final: NaNs, as bf16 and as f32.
constexpr std::byte kNotFinal{0xFF};

std::size_t as_size(std::int64_t number) { return static_cast<std::size_t>(number); }

}  // namespace

LateTiles::LateTiles(const Group& group, const PreparedCase& prepared, int rank, const ConstTensorView& x,
                     std::int64_t tile_rows, std::int32_t threshold)
    : on_device_(uses_device(group)),
      device_(on_device_ ? current_device() : 0),
      x_(static_cast<std::byte*>(const_cast<void*>(x.data))),
      slab_capacity_(prepared.world.options.slab_capacity),
      tiles_per_expert_((slab_capacity_ + tile_rows - 1) / tile_rows),
      num_rows_(prepared.routings[as_size(rank)].num_rows_per_local_expert) {
  const auto element_bytes = static_cast<std::int64_t>(size_bytes(x.dtype));
  const auto num_experts = static_cast<std::int64_t>(num_rows_.size());
  row_bytes_ = x.extent(x.num_dims - 1) * element_bytes;
  stride_bytes_ = x.stride(x.num_dims - 2) * element_bytes;
  const std::int64_t num_slab_rows = num_experts * slab_capacity_;
  const std::int64_t bytes = num_slab_rows > 0 ? (num_slab_rows - 1) * stride_bytes_ + row_bytes_ : 0;
  rows_ = read_memory(on_device_, x_, as_size(bytes));
  words_ = PlainMemory(on_device_, as_size(num_experts * tiles_per_expert_) * sizeof(std::int32_t));
  signals_ = {ConstTensorView(words_.data(), DType::kInt32, {num_experts, tiles_per_expert_}), tile_rows, threshold};
  for (std::int64_t local = 0; local < num_experts; ++local) {
    for (std::int64_t tile = 0; tile * tile_rows < num_rows_[as_size(local)]; ++tile) tiles_.push_back({local, tile});
  }
  reset();
}

void LateTiles::reset() {
  fill_memory(on_device_, words_.data(), std::byte{0}, as_size(signals_.words.num_elements()) * sizeof(std::int32_t));
  for (const Tile& tile : tiles_) {
    const Range range = range_of(tile);
    fill_memory(on_device_, x_ + range.begin, kNotFinal, range.end - range.begin);
  }
}

LateTiles::Range LateTiles::range_of(const Tile& tile) const {
  const std::int64_t begin = tile.index * signals_.tile_rows;
  const std::int64_t end = std::min<std::int64_t>(begin + signals_.tile_rows, num_rows_[as_size(tile.local_expert)]);
  const std::int64_t first = tile.local_expert * slab_capacity_;
  return {as_size((first + begin) * stride_bytes_), as_size((first + end - 1) * stride_bytes_ + row_bytes_)};
}

std::byte* LateTiles::word_at(const Tile& tile) {
  return words_.data() + as_size(tile.local_expert * tiles_per_expert_ + tile.index) * sizeof(std::int32_t);
}

void LateTiles::set_word(const Tile& tile, std::int32_t value) {
  if (on_device_) {
    copy_to_device(word_at(tile), &value, sizeof(value));  // after all earlier copies of the thread
  } else {
    std::atomic_ref(*reinterpret_cast<std::int32_t*>(word_at(tile))).store(value, std::memory_order_release);
  }
}

void LateTiles::almost_finish(const Tile& tile) { set_word(tile, signals_.threshold - 1); }

void LateTiles::finish(const Tile& tile) {
  almost_finish(tile);
  const Range range = range_of(tile);
  write_memory(on_device_, x_ + range.begin, rows_.data() + range.begin, range.end - range.begin);
  set_word(tile, signals_.threshold);
}

void LateTiles::finish_all() {
  std::vector<Tile> order = tiles_;
  std::mt19937 random(static_cast<std::mt19937::result_type>(order.size()));
  std::ranges::shuffle(order, random);
  for (const Tile& tile : order) finish(tile);
}

std::thread LateTiles::finish_late() {
  return std::thread([this] {
    if (on_device_) use_device(device_);
    std::this_thread::sleep_for(kLate);
    finish_all();
  });
}

}  // namespace ferry::test

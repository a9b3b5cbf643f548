#ifndef FERRY_CUDA_PLACEMENT_PLACEMENTS_HPP
#define FERRY_CUDA_PLACEMENT_PLACEMENTS_HPP

/// Expert placements in device memory. Programs use one or a few; each is uploaded when first seen and kept.

#include <cstdint>
#include <memory>
#include <vector>

#include "core/expert_placement.hpp"
#include "cuda/driver/own_stream.hpp"
#include "cuda/memory/table_memory.hpp"
#include "cuda/placement/placement_tables.hpp"

namespace ferry::cuda {

/// One placement, on the host and on the device.
struct Placement {
  std::shared_ptr<const ExpertPlacement> made_of;
  std::vector<std::int32_t> local_expert_ids;  ///< of this rank
  PlacementTables tables;
  std::shared_ptr<std::byte> memory;
};

class Placements {
 public:
  Placements(std::shared_ptr<TableMemory> memory, std::shared_ptr<OwnStream> stream, int rank, int num_ranks)
      : memory_(std::move(memory)), stream_(std::move(stream)), rank_(rank), num_ranks_(num_ranks) {}

  /// Uploads and waits for that when the placement is new.
  Result<std::shared_ptr<const Placement>> find(const std::shared_ptr<const ExpertPlacement>& placement);

 private:
  Result<std::shared_ptr<const Placement>> upload(const std::shared_ptr<const ExpertPlacement>& made_of);

  std::shared_ptr<TableMemory> memory_;
  std::shared_ptr<OwnStream> stream_;
  int rank_;
  int num_ranks_;
  std::vector<std::shared_ptr<const Placement>> recent_;  // latest last
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_PLACEMENT_PLACEMENTS_HPP

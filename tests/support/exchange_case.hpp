#ifndef FERRY_TESTS_EXCHANGE_CASE_HPP
#define FERRY_TESTS_EXCHANGE_CASE_HPP

/// One route with its later dispatches and combines, described in a few fields, and the oracle's results for them. All
/// of it is computed before the ranks start, so that ranks only run the library and compare.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "oracle/oracle.hpp"
#include "support/random_world.hpp"
#include "support/tensor_image.hpp"

namespace ferry::test {

enum class ScaleStrides {
  kDense,
  kRowGaps,
  kColumnMajor,
  kColumnSteps,
  // Output of a slab as [L, C, S] with gaps between experts; inputs are kDense.
  kSlabRows,     ///< row-major for each expert
  kSlabColumns,  ///< column-major for each expert
};

struct DispatchSpec {
  DType dtype = DType::kBfloat16;
  std::int64_t hidden = 32;
  Quantization quantize = Quantization::kNone;
  std::int64_t num_scales = 0;  ///< 0: no scales travel. If dispatch quantises, `prepare` fills it in
  DType scale_dtype = DType::kFloat32;
  ScaleStrides scale_strides = ScaleStrides::kDense;
  bool zero_padding = false;
  bool own_weights = false;  ///< send weights other than those of route
  bool ask_tables = true;    ///< pass topk_idx, topk_weights (if any travel) and source
  DType id_dtype = DType::kInt64;
};

/// Values of combine's payload.
enum class Values {
  kRandom,
  kBlocks,   ///< as random_activations draws bf16: blocks of 128 of any size, zeros, numbers far below the others
  kSpecial,  ///< NaNs of all kinds, infinities, both zeros, subnormals and the largest numbers among random ones
};

struct CombineSpec {
  DType dtype = DType::kBfloat16;
  std::int64_t hidden = 32;
  bool weighted = false;
  CombineOrder order = CombineOrder::kExact;  ///< latency mode, where a combine is weighted
  bool own_weights = false;                   ///< use weights other than those of route
  int num_biases = 0;
  bool return_weights = false;
  Values values = Values::kRandom;
  WireFormat wire_format = WireFormat::kAsGiven;
};

struct ExchangeCase {
  std::string name;
  WorldSpec world;
  DType id_dtype = DType::kInt64;  ///< of route's topk_idx
  MemoryKind memory = MemoryKind::kSymmetric;
  bool table_on_device = false;       ///< GPUs: the placement is in device memory
  std::int64_t gap_granules = 0;      ///< between payload rows, in units of 16 bytes
  bool slab_view = false;             ///< kSlab: give payload outputs and inputs as [L, C, H]
  std::int64_t spare_max_tokens = 0;  ///< latency mode: max_tokens beyond the most of any rank
  std::vector<int> masked;            ///< latency mode: ranks masked by the ranks whose results are checked
  std::vector<int> combine_masked;    ///< the same, from after the dispatch
  std::vector<DispatchSpec> dispatches;
  std::vector<CombineSpec> combines;
};

/// Inputs and expected outputs of one rank's dispatch.
struct RankDispatch {
  TensorImage x, scales, topk_weights;
  TensorImage out_x, out_scales, out_topk_idx, out_topk_weights, out_source;
};

struct RankCombine {
  TensorImage x, weights, topk_weights;
  std::array<TensorImage, 2> bias;
  TensorImage out_x, out_weights;
};

struct PreparedCase {
  ExchangeCase spec;
  oracle::World given;  ///< input of the ranks' route
  oracle::World world;  ///< `given` after the tokens have picked their homes
  std::vector<oracle::RankRouting> routings;
  std::vector<std::vector<RankDispatch>> dispatches;  ///< [dispatch][rank]
  std::vector<std::vector<RankCombine>> combines;     ///< [combine][rank]

  std::int64_t num_tokens(int rank) const { return world.ranks[static_cast<std::size_t>(rank)].num_tokens; }
  bool sends_scales(std::size_t dispatch_idx) const {
    return receives_scales(dispatch_idx) && spec.dispatches[dispatch_idx].quantize == Quantization::kNone;
  }
  bool receives_scales(std::size_t dispatch_idx) const { return spec.dispatches[dispatch_idx].num_scales != 0; }
  bool receives_ids(std::size_t dispatch_idx) const {
    return spec.dispatches[dispatch_idx].ask_tables && world.options.layout == Layout::kTokens;
  }
  bool receives_weights(std::size_t dispatch_idx) const {
    const DispatchSpec& dispatch = spec.dispatches[dispatch_idx];
    return dispatch.ask_tables && (dispatch.own_weights || spec.world.weights);
  }
  bool slabs(int rank) const {
    return spec.slab_view && world.options.layout == Layout::kSlab &&
           !routings[static_cast<std::size_t>(rank)].local_expert_ids.empty();
  }
};

PreparedCase prepare(const ExchangeCase& spec);

/// Draws a random case with several dispatches and combines.
ExchangeCase draw_case(std::mt19937_64& random, int num_ranks);

}  // namespace ferry::test

#endif  // FERRY_TESTS_EXCHANGE_CASE_HPP

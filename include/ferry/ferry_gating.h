#ifndef FERRY_GATING_H
#define FERRY_GATING_H

/// C interface: router logits to top-k experts (ferry/gating.hpp). Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::GatingScore.
enum { FERRY_SCORE_SOFTMAX = 0, FERRY_SCORE_SIGMOID = 1, FERRY_SCORE_SOFTMAX_OF_CHOSEN = 2 };
/// ferry::GatingGroupScore.
enum { FERRY_GROUP_SCORE_BEST_TWO = 0, FERRY_GROUP_SCORE_BEST = 1 };
/// ferry::GatingOverflow.
enum { FERRY_OVERFLOW_DROP = 0, FERRY_OVERFLOW_RECHOOSE = 1 };

/// ferry::GatingOptions.
typedef struct ferry_gating_options {
  uint64_t struct_size;
  int64_t capacity;             ///< tokens that each expert takes in this call; 0: any number
  uint64_t noise_seed;          ///< seed of `noise`
  int64_t first_token;          ///< number of the first row, for `noise`
  int32_t score;                ///< FERRY_SCORE_SOFTMAX, …
  int32_t group_score;          ///< FERRY_GROUP_SCORE_BEST_TWO, …
  int32_t overflow;             ///< with a capacity: FERRY_OVERFLOW_DROP, …
  int32_t num_topk;             ///< K; 0: 1
  int32_t num_groups;           ///< number of groups of experts; 0: 1
  int32_t num_selected_groups;  ///< groups that may be chosen from; 0: 1
  int32_t keep_sum;             ///< do not divide the chosen weights by their sum
  float scale;                  ///< factor of the weights; 0: 1
  float epsilon;                ///< added to the sum that weights are divided by
  float noise;                  ///< standard deviation of the noise added to logits for choosing; 0: none
} ferry_gating_options;

/// Choose experts for each token. logits [T, E] f32 | bf16; bias [E] f32, or NULL; topk_idx [T, K] i32 | i64;
/// topk_weights [T, K] f32. Needs no group.
FERRY_C_API ferry_status* ferry_select_experts(const ferry_tensor* logits, const ferry_tensor* bias,
                                               const ferry_gating_options* options, const ferry_tensor* topk_idx,
                                               const ferry_tensor* topk_weights,
                                               const ferry_execution_options* execution, void* stream);

/// Balance without an auxiliary loss: bias [E] f32 falls by `rate` where load [E] i32 | i64 is above the mean, and
/// rises where it is below. Host memory.
FERRY_C_API ferry_status* ferry_update_gating_bias(const ferry_tensor* bias, const ferry_tensor* load, float rate);

/// Gating of a published model ("deepseek-v3", …): fills `options`, *num_experts, and *has_bias (the model includes a
/// bias); each may be NULL. FERRY_ERROR_INVALID_ARGUMENT: no such preset; the message lists them.
FERRY_C_API ferry_status* ferry_gating_preset(const char* name, ferry_gating_options* options, int64_t* num_experts,
                                              int32_t* has_bias);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_GATING_H

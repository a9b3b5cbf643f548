#ifndef FERRY_TESTS_C_LAYER_H
#define FERRY_TESTS_C_LAYER_H

#include "c/check.h"

/// One rank's part of a Mixture-of-Experts layer whose numbers are exact in f32: x are small integers, weights
/// multiples of a quarter, and expert e multiplies by e + 1.
typedef struct layer {
  ferry_group* group;
  int64_t num_tokens;   ///< T, different on every rank
  int64_t num_experts;  ///< E, not a multiple of the number of ranks
  float* x;             ///< [T, H]
  int64_t* topk_idx;    ///< [T, K], with -1
  float* topk_weights;  ///< [T, K]
  float* out;           ///< [T, H]
} layer;

enum { LAYER_HIDDEN = 128, LAYER_TOPK = 3 };

layer make_layer(ferry_group* group);
void free_layer(layer* made);
/// Compares all rows of `out` with all experts computed on this rank, then clears `out`.
void expect_dense(layer* made, const char* what);

/// Each runs the whole layer in one layout or mode and checks its result.
void run_experts_layout(layer* made, int replicas);
void run_tokens_layout(layer* made);
void run_latency_mode(layer* made, int32_t split);
/// Combines rows that travel as FP8. Groups of several nodes refuse that.
void run_fp8_combine(layer* made);

#endif  // FERRY_TESTS_C_LAYER_H

// Calls besides those of a layer: quantisation, tables, masks, bounded rows.
#include <stdio.h>
#include <string.h>

#include "c/check.h"

enum { TOKENS = 3, TOPK = 2, HIDDEN = 128, EXPERTS = 4, BF16_ONE = 0x3F80, BF16_MINUS_HALF = 0xBF00 };

static void fill(uint16_t* x) {
  int i;
  for (i = 0; i < TOKENS * HIDDEN; ++i) x[i] = i % 3 == 0 ? BF16_MINUS_HALF : BF16_ONE;
}

static void check_quantization(void) {
  uint16_t x[TOKENS * HIDDEN];
  uint16_t back[TOKENS * HIDDEN];
  uint8_t q[TOKENS * HIDDEN];
  float scales[TOKENS];
  ferry_tensor x_view = matrix(x, FERRY_BFLOAT16, TOKENS, HIDDEN);
  ferry_tensor back_view = matrix(back, FERRY_BFLOAT16, TOKENS, HIDDEN);
  ferry_tensor q_view = matrix(q, FERRY_FLOAT8_E4M3, TOKENS, HIDDEN);
  ferry_tensor scale_view = matrix(scales, FERRY_FLOAT32, TOKENS, 1);
  ferry_execution_options options = {0};
  fill(x);
  options.struct_size = sizeof(options);
  expect_ok(ferry_quantize_fp8(&x_view, &q_view, &scale_view, FERRY_FP8_SCALE_POWER_OF_TWO, &options, NULL),
            "ferry_quantize_fp8");
  expect(scales[0] == 1.0F / 256, "the scale: 2^ceil(log2(1 / 448))");
  expect_ok(ferry_dequantize_fp8(&q_view, &scale_view, &back_view, NULL, NULL), "ferry_dequantize_fp8");
  expect(memcmp(x, back, sizeof(x)) == 0, "FP8 and back");
  expect_error(ferry_quantize_fp8(&x_view, &q_view, &scale_view, 9, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "format");
  x_view.dtype = 99;
  expect_error(ferry_quantize_fp8(&x_view, &q_view, &scale_view, 0, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "dtype 99");
  x_view.dtype = FERRY_BFLOAT16;
  options.backend = "none such";
  expect_error(ferry_quantize_fp8(&x_view, &q_view, &scale_view, 0, &options, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "none such");

  q_view.dtype = FERRY_INT8;
  expect_ok(ferry_quantize_int8(&x_view, &q_view, &scale_view, NULL, NULL), "ferry_quantize_int8");
  expect(scales[0] == 1.0F / 127 && q[1] == 127, "INT8");
  expect_ok(ferry_dequantize_int8(&q_view, &scale_view, &back_view, NULL, NULL), "ferry_dequantize_int8");
  expect(back[1] == BF16_ONE, "INT8 and back");
}

static void check_layout(void) {
  int32_t topk_idx[TOKENS * TOPK] = {0, 1, 2, -1, 3, 3};
  int32_t of_rank[2];
  int32_t of_expert[EXPERTS];
  uint8_t in_rank[TOKENS * 2];
  ferry_tensor ids = matrix(topk_idx, FERRY_INT32, TOKENS, TOPK);
  ferry_dispatch_layout_options options = {0};
  ferry_dispatch_layout_output output = {0};
  options.struct_size = sizeof(options);
  options.num_experts = EXPERTS;
  options.num_ranks = 2;
  output.struct_size = sizeof(output);
  output.num_tokens_per_rank = matrix(of_rank, FERRY_INT32, 2, 0);
  output.num_tokens_per_rank.num_dims = 1;
  output.num_tokens_per_expert = matrix(of_expert, FERRY_INT32, EXPERTS, 0);
  output.num_tokens_per_expert.num_dims = 1;
  output.is_token_in_rank = matrix(in_rank, FERRY_UINT8, TOKENS, 2);
  expect_ok(ferry_dispatch_layout(&ids, &options, &output, NULL), "ferry_dispatch_layout");
  expect(of_rank[0] == 1 && of_rank[1] == 2, "tokens of each rank");
  expect(of_expert[0] == 1 && of_expert[1] == 1 && of_expert[2] == 1 && of_expert[3] == 2, "tokens of each expert");
  expect(in_rank[0] == 1 && in_rank[1] == 0 && in_rank[2] == 0 && in_rank[3] == 1, "whether a token is in a rank");
}

static void check_gating(void) {
  float logits[2 * EXPERTS] = {0, 3, 1, 2, 5, 0, 4, 0};
  float weights[2 * TOPK];
  float bias[EXPERTS] = {0, 0, 0, 0};
  int32_t load[EXPERTS] = {0, 4, 2, 2};
  int64_t topk_idx[2 * TOPK];
  int64_t num_experts = 0;
  int32_t has_bias = 0;
  ferry_tensor logit_view = matrix(logits, FERRY_FLOAT32, 2, EXPERTS);
  ferry_tensor id_view = matrix(topk_idx, FERRY_INT64, 2, TOPK);
  ferry_tensor weight_view = matrix(weights, FERRY_FLOAT32, 2, TOPK);
  ferry_tensor bias_view = matrix(bias, FERRY_FLOAT32, EXPERTS, 0);
  ferry_tensor load_view = matrix(load, FERRY_INT32, EXPERTS, 0);
  ferry_gating_options options = {0};
  options.struct_size = sizeof(options);
  options.num_topk = TOPK;
  expect_ok(ferry_select_experts(&logit_view, NULL, &options, &id_view, &weight_view, NULL, NULL), "select_experts");
  expect(topk_idx[0] == 1 && topk_idx[1] == 3 && topk_idx[2] == 0 && topk_idx[3] == 2, "chosen experts");
  expect(weights[0] > 0.73F && weights[0] < 0.74F && weights[1] > 0.26F && weights[1] < 0.27F, "softmax of 3 and 2");
  options.num_topk = 9;
  expect_code(ferry_select_experts(&logit_view, NULL, &options, &id_view, &weight_view, NULL, NULL),
              FERRY_ERROR_INVALID_ARGUMENT, "more experts than there are");

  bias_view.num_dims = load_view.num_dims = 1;
  expect_ok(ferry_update_gating_bias(&bias_view, &load_view, 0.5F), "ferry_update_gating_bias");
  expect(bias[0] == 0.5F && bias[1] == -0.5F && bias[2] == 0, "biases");

  expect_ok(ferry_gating_preset("deepseek-v3", &options, &num_experts, &has_bias), "ferry_gating_preset");
  expect(num_experts == 256 && has_bias == 1 && options.num_topk == 8 && options.score == FERRY_SCORE_SIGMOID &&
             options.num_groups == 8 && options.scale == 2.5F && options.struct_size == sizeof(options),
         "DeepSeek-V3");
  expect_error(ferry_gating_preset("none such", NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "mixtral");
}

/// Balances four experts, one with most of the load, on six places of two ranks.
static int32_t count_and_end(void* user) {
  ++*(int*)user;
  return 1;
}

static void check_balance(void) {
  enum { PLACES = 6, RANKS = 2 };
  int32_t load[EXPERTS] = {10, 80, 10, 20};
  int32_t before[PLACES] = {0, 1, 2, 3, 0, 1};
  ferry_tensor load_view = matrix(load, FERRY_INT32, 1, EXPERTS);
  ferry_tensor before_view = matrix(before, FERRY_INT32, 1, PLACES);
  ferry_tensor after_view;
  ferry_balance_options options = {0};
  ferry_balance_sizes sizes = {0};
  ferry_move_plan_options how = {0};
  ferry_balance* balance = NULL;
  ferry_move_plan* plan = NULL;
  const int32_t* counts;
  const ferry_expert_copy* copies;
  int64_t num;
  int64_t num_waves;
  int num_questions = 0;
  options.struct_size = sizeof(options);
  options.num_replicas = PLACES;
  options.num_ranks = RANKS;
  expect_ok(ferry_balance_create(&load_view, &options, &balance), "ferry_balance_create");
  sizes.struct_size = sizeof(sizes);
  expect_ok(ferry_balance_get_sizes(balance, &sizes), "ferry_balance_get_sizes");
  expect(sizes.num_layers == 1 && sizes.num_experts == EXPERTS && sizes.num_replicas == PLACES &&
             sizes.num_ranks == RANKS && sizes.policy != FERRY_BALANCE_AUTO,
         "sizes of the balance");
  counts = ferry_balance_replica_counts(balance, &num);
  expect(num == EXPERTS && counts[1] >= 2 && counts[0] + counts[1] + counts[2] + counts[3] == PLACES, "replicas");
  expect(*ferry_balance_max_load(balance, NULL) == 60 && *ferry_balance_mean_load(balance, NULL) == 60, "loads");

  after_view = matrix((void*)(intptr_t)ferry_balance_physical_to_logical(balance, &num), FERRY_INT32, 1, PLACES);
  expect(num == PLACES, "the placement");
  how.struct_size = sizeof(how);
  how.num_experts = EXPERTS;
  how.num_ranks = RANKS;
  expect_ok(ferry_move_plan_create(&before_view, &after_view, &how, &plan), "ferry_move_plan_create");
  copies = ferry_move_plan_copies(plan, &num);
  expect(ferry_move_plan_wave_begin(plan, &num_waves)[num_waves - 1] == num, "waves");
  while (num-- > 0) {
    expect(copies[num].to_staging || ((const int32_t*)after_view.data)[copies[num].to] == copies[num].expert,
           "a copy brings the expert that the placement names");
  }
  ferry_move_plan_free(plan);
  ferry_balance_free(balance);
  options.interrupted = count_and_end;
  options.interrupted_user = &num_questions;
  expect_code(ferry_balance_create(&load_view, &options, &balance), FERRY_ERROR_SYSTEM, "a balance that is ended");
  expect(num_questions == 1, "the program is asked");
  options.interrupted = NULL;
  options.num_replicas = EXPERTS - 1;
  expect_code(ferry_balance_create(&load_view, &options, &balance), FERRY_ERROR_INVALID_ARGUMENT, "too few places");
  expect(ferry_balance_num_moves(NULL, &num) == NULL && num == 0, "arrays of no balance");
}

/// Three ranks with two experts each, of which the one in the middle is lost.
static void check_survivors(void) {
  enum { ROOM = 6 };
  static const int32_t kHomes[4] = {0, 1, 4, 5};
  static const int32_t kRanks[4] = {0, 0, 1, 1};
  static const int32_t kPicks[4] = {1, -1, 2, -1};
  int32_t kept[2] = {0, 2};
  int32_t homes[ROOM];
  int32_t ranks[ROOM];
  int32_t ids[4] = {1, 2, 4, 3};
  ferry_tensor ids_view = matrix(ids, FERRY_INT32, 4, 1);
  ferry_placement placement = {0};
  int64_t num = -1;
  expect_ok(ferry_surviving_placement(NULL, 6, 3, kept, 2, ROOM, homes, ranks, &num), "ferry_surviving_placement");
  expect(num == 4 && memcmp(homes, kHomes, sizeof(kHomes)) == 0 && memcmp(ranks, kRanks, sizeof(kRanks)) == 0,
         "the placement that is left");
  placement.struct_size = sizeof(placement);
  placement.physical_to_logical = homes;
  placement.physical_to_rank = ranks;
  placement.num_physical_experts = num;
  expect_code(ferry_check_placement(&placement, 6, 2), FERRY_ERROR_INVALID_ARGUMENT, "experts without a home");
  placement.allow_homeless = 1;
  expect_ok(ferry_check_placement(&placement, 6, 2), "ferry_check_placement");
  expect_ok(ferry_pick_replicas(&ids_view, 6, &placement, 0, 2, 2, &ids_view), "ferry_pick_replicas");
  expect(memcmp(ids, kPicks, sizeof(kPicks)) == 0, "picks");
  num = -1;
  expect_error(ferry_surviving_placement(NULL, 6, 3, kept, 2, 3, homes, ranks, &num), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "capacity is 3, expected room for 4");
  expect_error(ferry_surviving_placement(NULL, 6, 3, NULL, 2, ROOM, homes, ranks, &num), FERRY_ERROR_INVALID_ARGUMENT,
               -1, "kept_ranks is null");
  expect_error(ferry_surviving_placement(NULL, 6, 3, kept, 4, ROOM, homes, ranks, &num), FERRY_ERROR_INVALID_ARGUMENT,
               -1, "num_kept_ranks is 4");
  expect_error(ferry_surviving_placement(NULL, 6, 3, kept, 2, ROOM, NULL, ranks, &num), FERRY_ERROR_INVALID_ARGUMENT,
               -1, "null");
  kept[1] = 0;
  expect_error(ferry_surviving_placement(NULL, 6, 3, kept, 2, ROOM, homes, ranks, &num), FERRY_ERROR_INVALID_ARGUMENT,
               -1, "kept_ranks[1] is 0");
  expect(num == -1, "failed calls write nothing");
}

/// One rank: quantised dispatch into bounded rows, and the routing as tables.
static void check_calls(ferry_group* group) {
  enum { ROOM = 5 };
  int32_t topk_idx[TOKENS * TOPK] = {0, 1, -1, -1, 3, 2};
  float topk_weights[TOKENS * TOPK] = {1, 2, 3, 4, 5, 6};
  uint16_t x[TOKENS * HIDDEN];
  uint8_t rows[ROOM * HIDDEN];
  uint8_t q[TOKENS * HIDDEN];
  float scales[ROOM];
  float expected_scales[TOKENS];
  int32_t source_token[ROOM] = {0};
  ferry_tensor x_view = matrix(x, FERRY_BFLOAT16, TOKENS, HIDDEN);
  ferry_tensor q_view = matrix(q, FERRY_FLOAT8_E4M3, TOKENS, HIDDEN);
  ferry_tensor scale_view = matrix(expected_scales, FERRY_FLOAT32, TOKENS, 1);
  ferry_tensor view;
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_dispatch_options how = {0};
  ferry_channel_tables_output tables = {0};
  ferry_routing* routing = NULL;
  fill(x);
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(topk_idx, FERRY_INT32, TOKENS, TOPK);
  choice.topk_weights = matrix(topk_weights, FERRY_FLOAT32, TOKENS, TOPK);
  options.struct_size = sizeof(options);
  options.num_experts = EXPERTS;
  options.max_recv_rows = ROOM;
  expect_ok(ferry_route(group, &choice, &options, NULL, &routing), "ferry_route");
  expect(ferry_routing_num_recv_rows(routing) == ROOM && ferry_routing_num_used_rows(routing) == 2, "bounded rows");
  expect(ferry_routing_num_tokens(routing) == TOKENS && ferry_routing_num_topk(routing) == TOPK &&
             ferry_routing_num_experts(routing) == EXPERTS && ferry_routing_layout(routing) == FERRY_LAYOUT_TOKENS,
         "sizes and layout of the routing");
  ferry_routing_topk_weights(routing, &view);
  expect(view.num_dims == 2 && view.shape[0] == TOKENS && view.strides[0] == TOPK && view.dtype == FERRY_FLOAT32 &&
             memcmp(view.data, topk_weights, sizeof(topk_weights)) == 0,
         "the routing's copy of the weights");
  ferry_routing_num_recv_rows_view(routing, &view);
  expect(view.num_dims == 1 && *(const int32_t*)view.data == 2, "the number of rows in memory");
  ferry_routing_source_ranges(routing, &view);
  expect(view.num_dims == 0, "a view that is absent");

  send.struct_size = sizeof(send);
  send.x = x_view;
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows, FERRY_FLOAT8_E4M3, ROOM, HIDDEN);
  receive.scales = matrix(scales, FERRY_FLOAT32, ROOM, 1);
  how.struct_size = sizeof(how);
  how.quantize = FERRY_QUANTIZE_FP8;
  how.zero_padding = 1;
  memset(rows, 0xFF, sizeof(rows));
  expect_ok(ferry_dispatch(group, routing, &send, &receive, &how, NULL), "ferry_dispatch");
  expect_ok(ferry_quantize_fp8(&x_view, &q_view, &scale_view, FERRY_FP8_SCALE_FLOAT32, NULL, NULL),
            "ferry_quantize_fp8");
  expect(memcmp(rows, q, HIDDEN) == 0 && memcmp(rows + HIDDEN, q + 2 * HIDDEN, HIDDEN) == 0, "quantised rows");
  expect(scales[1] == expected_scales[2] && rows[2 * HIDDEN] == 0 && scales[4] == 0, "scales, and rows without tokens");

  tables.struct_size = sizeof(tables);
  tables.source_token = matrix(source_token, FERRY_INT32, ROOM, 0);
  tables.source_token.num_dims = 1;
  expect_ok(ferry_channel_tables(group, routing, 1, &tables, NULL), "ferry_channel_tables");
  expect(source_token[0] == 0 && source_token[1] == 2 && source_token[2] == -1, "tokens of the rows");
  expect_error(ferry_channel_tables(group, routing, 0, &tables, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "num_channels");
  ferry_routing_free(routing);
}

static void check_masks(ferry_bootstrap* bootstrap) {
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  int32_t masks[1] = {7};
  ferry_tensor view = matrix(masks, FERRY_INT32, 1, 0);
  view.num_dims = 1;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  check_calls(group);
  expect_error(ferry_latency_query_mask(group, &view, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "does not mask");
  ferry_group_free(group);

  options.network_service_level = 16;
  expect_error(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "network_service_level is 16, expected 0 to 15");
  options.network_service_level = -7; /* level 0 */
  options.network_paths = 17;
  expect_error(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "network_paths is 17, expected 1 to 16");
  options.network_paths = 2;
  options.mask_lost_ranks = 1;
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  expect_ok(ferry_latency_query_mask(group, &view, NULL), "ferry_latency_query_mask");
  expect(masks[0] == 0, "no rank is masked");
  expect_error(ferry_latency_update_mask(group, 0, 1, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "rank");
  expect_ok(ferry_latency_clear_mask(group, NULL), "ferry_latency_clear_mask");
  ferry_group_free(group);
}

int main(void) {
  ferry_bootstrap* bootstrap = NULL;
  ferry_latency_shape shape = {0};
  uint64_t num_bytes = 1;
  check_quantization();
  check_layout();
  check_gating();
  check_balance();
  check_survivors();
  expect_ok(ferry_bootstrap_create_in_process(1, &bootstrap), "ferry_bootstrap_create_in_process");
  check_masks(bootstrap);
  ferry_bootstrap_free(bootstrap);
  shape.struct_size = sizeof(shape);
  shape.max_tokens = shape.num_topk = 1;
  shape.dispatch_row_bytes = shape.combine_row_bytes = HIDDEN;
  expect_ok(ferry_latency_bytes_required(&shape, &num_bytes), "ferry_latency_bytes_required");
  expect(num_bytes == 0, "CPU ranks need no landing memory");
  printf("calls_test: ok\n");
  return 0;
}

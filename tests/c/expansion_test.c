// Rows by token expanded to rows by expert and reduced back, and options for GPUs given to a CPU group.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c/check.h"

enum { TOKENS = 3, TOPK = 2, HIDDEN = 16, EXPERTS = 4, ROWS = 2, ALIGNMENT = 4, PLACES = EXPERTS * ALIGNMENT };
enum { BF16_ONE = 0x3F80, BF16_TWO = 0x4000, BF16_MINUS_HALF = 0xBF00, BF16_MINUS_ONE = 0xBF80 };

static ferry_tensor array(void* data, int32_t dtype, int64_t num) {
  ferry_tensor view = matrix(data, dtype, num, 0);
  view.num_dims = 1;
  return view;
}

static void not_called(void* user, ferry_early_tables* tables) {
  (void)tables;
  ++*(int*)user;
}

/// Dispatches tokens 0 and 2, each to two experts of this rank.
static ferry_routing* dispatch(ferry_group* group, const ferry_tensor* rows, const ferry_tensor* ids,
                               const ferry_tensor* weights) {
  static int32_t topk_idx[TOKENS * TOPK] = {0, 1, -1, -1, 3, 2};
  static float topk_weights[TOKENS * TOPK] = {1, 2, 3, 4, 5, 6};
  static uint16_t x[TOKENS * HIDDEN];
  int num_calls = 0;
  int i;
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_dispatch_options how = {0};
  ferry_routing* routing = NULL;
  for (i = 0; i < TOKENS * HIDDEN; ++i) x[i] = i < HIDDEN ? BF16_ONE : BF16_MINUS_HALF;
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(topk_idx, FERRY_INT32, TOKENS, TOPK);
  choice.topk_weights = matrix(topk_weights, FERRY_FLOAT32, TOKENS, TOPK);
  options.struct_size = sizeof(options);
  options.num_experts = EXPERTS;
  options.while_waiting = not_called;
  options.user = &num_calls;
  expect_ok(ferry_route(group, &choice, &options, NULL, &routing), "ferry_route");
  expect(num_calls == 0, "there is no GPU to wait for");
  send.struct_size = sizeof(send);
  send.x = matrix(x, FERRY_BFLOAT16, TOKENS, HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = *rows;
  receive.topk_idx = *ids;
  receive.topk_weights = *weights;
  how.struct_size = sizeof(how);
  how.clear_if_refused = 1;
  expect_ok(ferry_dispatch(group, routing, &send, &receive, &how, NULL), "ferry_dispatch");
  return routing;
}

static void make_tables(const ferry_routing* routing, const ferry_tensor* ids, const ferry_tensor* origin,
                        const ferry_tensor* ends) {
  ferry_arrivals arrivals = {0};
  ferry_arrival_tables_options options = {0};
  ferry_arrival_tables_output tables = {0};
  arrivals.struct_size = sizeof(arrivals);
  ferry_routing_source(routing, &arrivals.source);
  arrivals.topk_idx = *ids;
  ferry_routing_num_rows_per_local_expert_view(routing, &arrivals.rows_per_expert);
  options.struct_size = sizeof(options);
  options.max_tokens = TOKENS;
  options.expert_alignment = ALIGNMENT;
  options.expand = 1;
  tables.struct_size = sizeof(tables);
  tables.origin = *origin;
  tables.expert_ends = *ends;
  expect_ok(ferry_arrival_tables(&arrivals, &options, &tables, NULL), "ferry_arrival_tables");
  options.expert_alignment = -1;
  expect_error(ferry_arrival_tables(&arrivals, &options, &tables, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "alignment");
  arrivals.struct_size = 8;
  expect_error(ferry_arrival_tables(&arrivals, &options, &tables, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "ferry_arrivals");
}

static void check_rows(const uint16_t* places, const float* weights, const int32_t* row_of) {
  static const int32_t kRowOf[PLACES] = {0, -1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1};
  static const float kWeights[PLACES] = {1, 0, 0, 0, 2, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0, 0};
  int place;
  for (place = 0; place < PLACES; ++place) {
    const uint16_t expected = kRowOf[place] < 0 ? 0 : kRowOf[place] == 0 ? BF16_ONE : BF16_MINUS_HALF;
    int i;
    for (i = 0; i < HIDDEN; ++i) expect(places[place * HIDDEN + i] == expected, "the row at each place");
  }
  expect(memcmp(row_of, kRowOf, sizeof(kRowOf)) == 0, "the row of each place");
  expect(memcmp(weights, kWeights, sizeof(kWeights)) == 0, "the weight of each place");
}

static void check_expansion(ferry_group* group) {
  uint16_t* rows = memory(ROWS * HIDDEN * sizeof(*rows));
  uint16_t* places = memory(PLACES * HIDDEN * sizeof(*places));
  int64_t ids[ROWS * TOPK];
  float weights[ROWS * TOPK];
  float place_weights[PLACES];
  float back[ROWS * TOPK];
  int32_t origin[ROWS * (2 + TOPK)];
  int32_t ends[EXPERTS];
  int32_t row_of[PLACES];
  int i;
  ferry_tensor row_view = matrix(rows, FERRY_BFLOAT16, ROWS, HIDDEN);
  ferry_tensor id_view = matrix(ids, FERRY_INT64, ROWS, TOPK);
  ferry_tensor weight_view = matrix(weights, FERRY_FLOAT32, ROWS, TOPK);
  ferry_tensor origin_view = matrix(origin, FERRY_INT32, ROWS, 2 + TOPK);
  ferry_tensor end_view = array(ends, FERRY_INT32, EXPERTS);
  ferry_expand_input spread = {0};
  ferry_expand_output out = {0};
  ferry_reduce_input gathered = {0};
  ferry_reduce_output sums = {0};
  ferry_expansion_options options = {0};
  ferry_routing* routing = dispatch(group, &row_view, &id_view, &weight_view);
  make_tables(routing, &id_view, &origin_view, &end_view);
  expect(origin[0] == 0 && origin[2] == 0 && origin[3] == 4 && origin[4] == 2 && origin[6] == 12 && origin[7] == 8,
         "tokens and slots");

  memset(places, 0xFF, PLACES * HIDDEN * sizeof(*places));
  spread.struct_size = sizeof(spread);
  spread.slots = matrix(origin + 2, FERRY_INT32, ROWS, TOPK);
  spread.slots.strides[0] = 2 + TOPK;
  spread.slots.strides[1] = 1;
  spread.x = row_view;
  spread.weights = weight_view;
  out.struct_size = sizeof(out);
  out.x = matrix(places, FERRY_BFLOAT16, PLACES, HIDDEN);
  out.weights = array(place_weights, FERRY_FLOAT32, PLACES);
  out.row_of_slot = array(row_of, FERRY_INT32, PLACES);
  options.struct_size = sizeof(options);
  options.zero_padding = 1;
  expect_ok(ferry_expand_rows(&spread, &options, &out, NULL), "ferry_expand_rows");
  check_rows(places, place_weights, row_of);

  gathered.struct_size = sizeof(gathered);
  gathered.slots = spread.slots;
  gathered.x = out.x;
  gathered.weights = out.weights;
  sums.struct_size = sizeof(sums);
  sums.x = row_view;
  sums.weights = matrix(back, FERRY_FLOAT32, ROWS, TOPK);
  expect_ok(ferry_reduce_rows(&gathered, NULL, &sums, NULL), "ferry_reduce_rows");
  for (i = 0; i < HIDDEN; ++i) {
    expect(rows[i] == BF16_TWO && rows[HIDDEN + i] == BF16_MINUS_ONE, "the sums of two equal rows");
  }
  expect(memcmp(back, weights, sizeof(back)) == 0, "weights there and back");

  // A view without dimensions is absent, whatever its data pointer.
  out.row_of_slot.num_dims = out.weights.num_dims = spread.weights.num_dims = 0;
  options.zero_padding = 0;
  memset(row_of, 0x55, sizeof(row_of));
  spread.weights.data = NULL;
  expect_ok(ferry_expand_rows(&spread, &options, &out, NULL), "ferry_expand_rows without tables");
  for (i = 0; i < PLACES; ++i) expect(row_of[i] == 0x55555555, "an absent output is not written");
  spread.x.dtype = out.x.dtype = 99;
  expect_code(ferry_expand_rows(&spread, &options, &out, NULL), FERRY_ERROR_INVALID_ARGUMENT, "an unknown dtype");
  spread.x.dtype = out.x.dtype = FERRY_BFLOAT16;

  options.backend = "none such";
  expect_error(ferry_expand_rows(&spread, &options, &out, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "none such");
  expect_error(ferry_reduce_rows(&gathered, &options, &sums, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "none such");
  expect_error(ferry_expand_rows(NULL, NULL, &out, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "slots");
  out.struct_size = 0;
  expect_error(ferry_expand_rows(&spread, NULL, &out, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "ferry_expand_output");
  gathered.x.dtype = FERRY_INT32;
  expect_code(ferry_reduce_rows(&gathered, NULL, &sums, NULL), FERRY_ERROR_INVALID_ARGUMENT, "an unsupported dtype");
  ferry_routing_free(routing);
  free(rows);
  free(places);
}

int main(void) {
  ferry_bootstrap* bootstrap = NULL;
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  expect_ok(ferry_bootstrap_create_in_process(1, &bootstrap), "ferry_bootstrap_create_in_process");
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  ferry_known_memory_end();
  ferry_known_memory_begin();
  check_expansion(group);
  ferry_known_memory_end();
  ferry_group_free(group);
  ferry_bootstrap_free(bootstrap);
  printf("expansion_test: ok\n");
  return 0;
}

#include "c/layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float expert(int64_t expert_id, float x) { return (float)(expert_id + 1) * x; }

layer make_layer(ferry_group* group) {
  layer made;
  int32_t rank = ferry_group_rank(group);
  int64_t i;
  made.group = group;
  made.num_tokens = 5 + 3 * rank;
  made.num_experts = 2 * ferry_group_num_ranks(group) + 1;
  made.x = memory((size_t)(made.num_tokens * LAYER_HIDDEN) * sizeof(float));
  made.topk_idx = memory((size_t)(made.num_tokens * LAYER_TOPK) * sizeof(int64_t));
  made.topk_weights = memory((size_t)(made.num_tokens * LAYER_TOPK) * sizeof(float));
  made.out = memory((size_t)(made.num_tokens * LAYER_HIDDEN) * sizeof(float));
  for (i = 0; i < made.num_tokens * LAYER_HIDDEN; ++i) made.x[i] = (float)((7 * i + 3 * rank) % 17 - 8);
  for (i = 0; i < made.num_tokens * LAYER_TOPK; ++i) {
    // Experts of a token differ; every eleventh entry has no expert.
    int64_t token = i / LAYER_TOPK;
    made.topk_idx[i] = i % 11 == 10 ? -1 : (3 * token + 2 * (i % LAYER_TOPK) + rank) % made.num_experts;
    made.topk_weights[i] = (float)(i % 5) / 4.0F;
  }
  return made;
}

void free_layer(layer* made) {
  free(made->x);
  free(made->topk_idx);
  free(made->topk_weights);
  free(made->out);
}

void expect_dense(layer* made, const char* what) {
  int64_t i;
  for (i = 0; i < made->num_tokens * LAYER_HIDDEN; ++i) {
    int64_t entry = i / LAYER_HIDDEN * LAYER_TOPK;
    int64_t end = entry + LAYER_TOPK;
    float sum = 0;
    for (; entry < end; ++entry) {
      if (made->topk_idx[entry] >= 0) sum += made->topk_weights[entry] * expert(made->topk_idx[entry], made->x[i]);
    }
    if (made->out[i] != sum) {
      fprintf(stderr, "failed: %s: element %lld is %g, expected %g\n", what, (long long)i, (double)made->out[i],
              (double)sum);
      exit(1);
    }
  }
  memset(made->out, 0xFF, (size_t)(made->num_tokens * LAYER_HIDDEN) * sizeof(float));
}

static ferry_route_input choice_of(const layer* made) {
  ferry_route_input choice = {0};
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(made->topk_idx, FERRY_INT64, made->num_tokens, LAYER_TOPK);
  choice.topk_weights = matrix(made->topk_weights, FERRY_FLOAT32, made->num_tokens, LAYER_TOPK);
  return choice;
}

/// Gives every expert one home, and every other expert a second.
static int32_t* make_homes(const layer* made, ferry_placement* placement) {
  int32_t* logical = memory((size_t)(2 * made->num_experts) * sizeof(int32_t));
  int32_t expert_id;
  placement->struct_size = sizeof(*placement);
  placement->physical_to_logical = logical;
  for (expert_id = 0; expert_id < made->num_experts; ++expert_id) {
    logical[placement->num_physical_experts++] = expert_id;
    if (expert_id % 2 == 0) logical[placement->num_physical_experts++] = expert_id;
  }
  return logical;
}

static void expect_counted(const layer* made, const int64_t* counts) {
  int64_t expert_id;
  int64_t i;
  for (expert_id = 0; expert_id < made->num_experts; ++expert_id) {
    int64_t expected = 0;
    for (i = 0; i < made->num_tokens * LAYER_TOPK; ++i) expected += made->topk_idx[i] == expert_id;
    expect(counts[expert_id] == expected, "the load of an expert");
  }
}

void run_experts_layout(layer* made, int replicas) {
  ferry_route_input choice = choice_of(made);
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_combine_input results = {0};
  ferry_combine_output sums = {0};
  ferry_combine_options weighted = {0};
  ferry_routing* routing = NULL;
  ferry_buffer* rows = NULL;
  const int64_t* offsets;
  const int32_t* ids;
  int64_t num_rows, num_offsets, num_local, local, i;
  float* values;
  ferry_placement placement = {0};
  ferry_load_counters counters = {0};
  int64_t* counts = memory((size_t)made->num_experts * sizeof(int64_t));
  int32_t* logical = make_homes(made, &placement);

  options.struct_size = sizeof(options);
  options.num_experts = made->num_experts;
  options.layout = FERRY_LAYOUT_EXPERTS;
  options.expert_alignment = 4;
  counters.struct_size = sizeof(counters);
  counters.logical = matrix(counts, FERRY_INT64, made->num_experts, 0);
  counters.logical.num_dims = 1;
  options.counters = &counters;
  if (replicas) options.placement = &placement;
  expect_ok(ferry_route(made->group, &choice, &options, NULL, &routing), "ferry_route");
  num_rows = ferry_routing_num_recv_rows(routing);
  expect_ok(ferry_group_allocate(made->group, (uint64_t)(num_rows * LAYER_HIDDEN) * sizeof(float), &rows),
            "ferry_group_allocate");
  values = ferry_buffer_data(rows);

  send.struct_size = sizeof(send);
  send.x = matrix(made->x, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(values, FERRY_FLOAT32, num_rows, LAYER_HIDDEN);
  expect_ok(ferry_dispatch(made->group, routing, &send, &receive, NULL, NULL), "ferry_dispatch");

  offsets = ferry_routing_expert_row_offsets(routing, &num_offsets);
  ids = ferry_routing_local_expert_ids(routing, &num_local);
  expect(num_local == ferry_routing_num_local_experts(routing) && num_offsets == num_local + 1, "lengths of arrays");
  expect(ferry_routing_num_physical_experts(routing) == (replicas ? placement.num_physical_experts : made->num_experts),
         "physical experts");
  expect_counted(made, counts);
  for (local = 0; local < num_local; ++local) {
    expect(offsets[local] % 4 == 0, "alignment");
    for (i = offsets[local] * LAYER_HIDDEN; i < offsets[local + 1] * LAYER_HIDDEN; ++i) {
      values[i] = expert(replicas ? logical[ids[local]] : ids[local], values[i]);
    }
  }

  results.struct_size = sizeof(results);
  results.x = receive.x;
  sums.struct_size = sizeof(sums);
  sums.x = matrix(made->out, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  weighted.struct_size = sizeof(weighted);
  weighted.weighted = 1;
  expect_ok(ferry_combine(made->group, routing, &results, &sums, &weighted, NULL), "ferry_combine");
  expect_dense(made, replicas ? "layout experts, with replicas" : "layout experts");
  free(counts);
  free(logical);
  ferry_buffer_free(rows);
  ferry_routing_free(routing);
}

void run_tokens_layout(layer* made) {
  ferry_route_input choice = choice_of(made);
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_combine_input results = {0};
  ferry_combine_output sums = {0};
  ferry_routing* routing = NULL;
  const int32_t* ids;
  int32_t* owners = memory((size_t)made->num_experts * sizeof(int32_t));
  int32_t* recv_idx;
  int32_t* source;
  float* recv_weights;
  float* rows;
  int64_t num_rows, row, k, h;

  // Deals the experts out to the ranks in turn.
  for (k = 0; k < made->num_experts; ++k) owners[k] = (int32_t)(k % ferry_group_num_ranks(made->group));
  options.struct_size = sizeof(options);
  options.num_experts = made->num_experts;
  options.expert_to_rank = owners;
  options.num_expert_to_rank = made->num_experts;
  expect_ok(ferry_route(made->group, &choice, &options, NULL, &routing), "ferry_route");
  free(owners);  // the routing keeps no pointer into the options
  num_rows = ferry_routing_num_recv_rows(routing);
  rows = memory((size_t)(num_rows * LAYER_HIDDEN) * sizeof(float));
  recv_idx = memory((size_t)(num_rows * LAYER_TOPK) * sizeof(int32_t));
  recv_weights = memory((size_t)(num_rows * LAYER_TOPK) * sizeof(float));
  source = memory((size_t)(num_rows * 2) * sizeof(int32_t));

  send.struct_size = sizeof(send);
  send.x = matrix(made->x, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows, FERRY_FLOAT32, num_rows, LAYER_HIDDEN);
  receive.topk_idx = matrix(recv_idx, FERRY_INT32, num_rows, LAYER_TOPK);
  receive.topk_weights = matrix(recv_weights, FERRY_FLOAT32, num_rows, LAYER_TOPK);
  receive.source = matrix(source, FERRY_INT32, num_rows, 2);
  expect_ok(ferry_dispatch(made->group, routing, &send, &receive, NULL, NULL), "ferry_dispatch");

  ids = ferry_routing_local_expert_ids(routing, &k);
  while (k > 0) expect(ids[--k] % ferry_group_num_ranks(made->group) == ferry_group_rank(made->group), "own experts");
  for (row = 0; row < num_rows; ++row) {
    float factor = 0;
    expect(row == 0 || source[2 * row] >= source[2 * row - 2], "rows in order of their sources");
    for (k = row * LAYER_TOPK; k < (row + 1) * LAYER_TOPK; ++k) {
      if (recv_idx[k] >= 0) factor += recv_weights[k] * expert(ids[recv_idx[k]], 1);
    }
    for (h = 0; h < LAYER_HIDDEN; ++h) rows[row * LAYER_HIDDEN + h] *= factor;
  }

  results.struct_size = sizeof(results);
  results.x = receive.x;
  sums.struct_size = sizeof(sums);
  sums.x = matrix(made->out, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  expect_ok(ferry_combine(made->group, routing, &results, &sums, NULL, NULL), "ferry_combine");
  expect_dense(made, "layout tokens");
  free(rows);
  free(recv_idx);
  free(recv_weights);
  free(source);
  ferry_routing_free(routing);
}

static float from_bf16(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

/// Rows hold 448 and 16.5 in turn, and all weights are 1. The largest code of E4M3 is 448, so the scale of a sum of n
/// rows is n, and 16.5 becomes 16.
static void expect_fp8_sums(layer* made, const ferry_routing* routing, int64_t num_rows, int32_t split) {
  const uint16_t even_channel = 0x43E0;
  const uint16_t odd_channel = 0x4184;
  const int64_t num_sums = made->num_tokens * LAYER_HIDDEN;
  ferry_latency_combine_input results = {0};
  ferry_latency_combine_output sums = {0};
  ferry_latency_combine_options adding = {0};
  uint16_t* rows = memory((size_t)(num_rows * LAYER_HIDDEN) * sizeof(uint16_t));
  uint16_t* out = memory((size_t)num_sums * sizeof(uint16_t));
  float* ones = memory((size_t)(made->num_tokens * LAYER_TOPK) * sizeof(float));
  int64_t i;

  for (i = 0; i < num_rows * LAYER_HIDDEN; ++i) rows[i] = i % 2 == 0 ? even_channel : odd_channel;
  for (i = 0; i < made->num_tokens * LAYER_TOPK; ++i) ones[i] = 1;
  results.struct_size = sizeof(results);
  results.x = matrix(rows, FERRY_BFLOAT16, num_rows, LAYER_HIDDEN);
  results.topk_weights = matrix(ones, FERRY_FLOAT32, made->num_tokens, LAYER_TOPK);
  sums.struct_size = sizeof(sums);
  sums.x = matrix(out, FERRY_BFLOAT16, made->num_tokens, LAYER_HIDDEN);
  adding.struct_size = sizeof(adding);
  adding.split = split;
  adding.wire_format = FERRY_WIRE_FP8;
  expect_code(ferry_latency_combine(made->group, routing, &results, &sums, &adding, NULL), FERRY_ERROR_UNSUPPORTED,
              "FP8 of every row");
  adding.order = FERRY_ORDER_RANK_SUMS;
  expect_ok(ferry_latency_combine(made->group, routing, &results, &sums, &adding, NULL), "ferry_latency_combine");
  if (split) expect_ok(ferry_latency_receive(made->group, routing, NULL), "ferry_latency_receive of FP8 sums");
  for (i = 0; i < num_sums; i += 2) {
    expect(from_bf16(out[i + 1]) * 28 == from_bf16(out[i]), "sums of ranks were quantised");
  }
  free(rows);
  free(out);
  free(ones);
}

void run_latency_mode(layer* made, int32_t split) {
  const int64_t max_tokens = 5 + 3 * (ferry_group_num_ranks(made->group) - 1);
  const int64_t capacity = max_tokens * ferry_group_num_ranks(made->group);
  const int64_t most_local = 3;  // upper bound of local experts, of 2 R + 1
  ferry_latency_dispatch_input send = {0};
  ferry_latency_dispatch_output receive = {0};
  ferry_latency_dispatch_options options = {0};
  ferry_latency_combine_input results = {0};
  ferry_latency_combine_output sums = {0};
  ferry_latency_combine_options adding = {0};
  ferry_routing* routing = NULL;
  float* slab = memory((size_t)(most_local * capacity * LAYER_HIDDEN) * sizeof(float));
  const int32_t* counts;
  const int32_t* ids;
  int64_t num_local, local, i;
  int32_t rank = ferry_group_rank(made->group);
  int32_t num_ranks = ferry_group_num_ranks(made->group);
  const size_t times_bytes = (size_t)num_ranks * sizeof(int64_t);
  int64_t* waited_ns = memory(times_bytes);  // waits of these calls alone
  int64_t* before_ns = memory(times_bytes);
  int64_t* after_ns = memory(times_bytes);
  int32_t* words = memory((size_t)(most_local * capacity) * sizeof(int32_t));

  expect_ok(ferry_group_wait_times_ns(made->group, before_ns, num_ranks), "ferry_group_wait_times_ns");
  options.wait_times_ns = adding.wait_times_ns = matrix(waited_ns, FERRY_INT64, num_ranks, 0);
  options.wait_times_ns.num_dims = adding.wait_times_ns.num_dims = 1;
  send.struct_size = sizeof(send);
  send.x = matrix(made->x, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  send.topk_idx = matrix(made->topk_idx, FERRY_INT64, made->num_tokens, LAYER_TOPK);
  send.topk_weights = matrix(made->topk_weights, FERRY_FLOAT32, made->num_tokens, LAYER_TOPK);
  options.struct_size = sizeof(options);
  options.num_experts = made->num_experts;
  options.max_tokens = max_tokens;
  options.slab_capacity = capacity;
  options.split = split;
  num_local = (rank + 1) * made->num_experts / num_ranks - rank * made->num_experts / num_ranks;
  receive.struct_size = sizeof(receive);
  receive.x = matrix(slab, FERRY_FLOAT32, num_local * capacity, LAYER_HIDDEN);
  expect_ok(ferry_latency_dispatch(made->group, &send, &receive, &options, NULL, &routing), "ferry_latency_dispatch");
  if (split) expect_ok(ferry_latency_receive(made->group, routing, NULL), "ferry_latency_receive of the dispatch");

  counts = ferry_routing_num_rows_per_local_expert(routing, NULL);
  ids = ferry_routing_local_expert_ids(routing, &num_local);
  for (local = 0; local < num_local; ++local) {
    for (i = local * capacity * LAYER_HIDDEN; i < (local * capacity + counts[local]) * LAYER_HIDDEN; ++i) {
      slab[i] = expert(ids[local], slab[i]);
    }
  }

  for (i = 0; i < num_local * capacity; ++i) words[i] = 2;
  results.struct_size = sizeof(results);
  results.x = receive.x;
  results.signal_words = matrix(words, FERRY_INT32, num_local, capacity);
  results.tile_rows = 1;
  results.threshold = 2;
  sums.struct_size = sizeof(sums);
  sums.x = matrix(made->out, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  adding.struct_size = sizeof(adding);
  adding.split = split;
  expect_ok(ferry_latency_combine(made->group, routing, &results, &sums, &adding, NULL), "ferry_latency_combine");
  if (split) expect_ok(ferry_latency_receive(made->group, routing, NULL), "ferry_latency_receive of the combine");
  expect_dense(made, split ? "latency mode, split" : "latency mode");
  expect_ok(ferry_group_wait_times_ns(made->group, after_ns, num_ranks), "ferry_group_wait_times_ns");
  for (i = 0; i < num_ranks; ++i) expect(waited_ns[i] == after_ns[i] - before_ns[i], "the wait times of the calls");
  results.tile_rows = 0;
  expect_code(ferry_latency_combine(made->group, routing, &results, &sums, &adding, NULL), FERRY_ERROR_INVALID_ARGUMENT,
              "tiles of no rows");
  expect_fp8_sums(made, routing, num_local * capacity, split);
  free(words);
  free(waited_ns);
  free(before_ns);
  free(after_ns);
  ferry_routing_free(routing);
  free(slab);
}

void run_fp8_combine(layer* made) {
  ferry_route_input choice = choice_of(made);
  ferry_route_options options = {0};
  ferry_combine_input results = {0};
  ferry_combine_output sums = {0};
  ferry_combine_options quantised = {0};
  ferry_topology topology = {0};
  ferry_routing* routing = NULL;
  float* rows;
  int64_t num_values, i;

  options.struct_size = sizeof(options);
  options.num_experts = made->num_experts;
  expect_ok(ferry_route(made->group, &choice, &options, NULL, &routing), "ferry_route");
  num_values = ferry_routing_num_recv_rows(routing) * LAYER_HIDDEN;
  rows = memory((size_t)num_values * sizeof(float));
  // The largest E4M3 value makes the scale 1; 17 lies between 16 and 18 and becomes the even one.
  for (i = 0; i < num_values; ++i) rows[i] = i % 2 == 0 ? 448.0F : 17.0F;
  results.struct_size = sizeof(results);
  results.x = matrix(rows, FERRY_FLOAT32, num_values / LAYER_HIDDEN, LAYER_HIDDEN);
  sums.struct_size = sizeof(sums);
  sums.x = matrix(made->out, FERRY_FLOAT32, made->num_tokens, LAYER_HIDDEN);
  quantised.struct_size = sizeof(quantised);
  quantised.wire_format = FERRY_WIRE_FP8;
  topology.struct_size = sizeof(topology);
  expect_ok(ferry_group_topology(made->group, &topology), "ferry_group_topology");
  if (topology.num_nodes > 1) {
    expect_code(ferry_combine(made->group, routing, &results, &sums, &quantised, NULL), FERRY_ERROR_UNSUPPORTED,
                "FP8 over several nodes");
  } else {
    expect_ok(ferry_combine(made->group, routing, &results, &sums, &quantised, NULL), "ferry_combine");
    for (i = 0; i < made->num_tokens * LAYER_HIDDEN; i += 2) {
      expect(made->out[i + 1] * 28 == made->out[i], "rows were quantised");
    }
    quantised.wire_format = 9;
    expect_code(ferry_combine(made->group, routing, &results, &sums, &quantised, NULL), FERRY_ERROR_INVALID_ARGUMENT,
                "an unknown format");
  }
  free(rows);
  ferry_routing_free(routing);
}

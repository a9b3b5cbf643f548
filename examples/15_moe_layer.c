// The layer of the second example in C: ranks are processes, numbered by a launcher or by hand.
//
//   for r in 0 1 2 3; do FERRY_RANK=$r FERRY_NUM_RANKS=4 FERRY_SECRET=choose-one ./15_moe_layer & done; wait
//   FERRY_SECRET=choose-one mpirun -np 4 ./15_moe_layer
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ferry/ferry.h"

enum { NUM_TOKENS = 16, HIDDEN = 64, NUM_TOPK = 2, NUM_EXPERTS = 8 };  // T, H, K, E

// Stands in for the expert's matrix products: each expert computes something different.
static float expert(int64_t expert_id, float x) { return (float)(expert_id + 1) * x; }

static ferry_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  ferry_tensor view = {0};  // strides of zero: contiguous
  view.data = data;
  view.dtype = dtype;
  view.num_dims = 2;
  view.shape[0] = rows;
  view.shape[1] = columns;
  return view;
}

// Router's choice for one rank's tokens, and the layer's input and output.
typedef struct batch {
  int64_t topk_idx[NUM_TOKENS * NUM_TOPK];
  float topk_weights[NUM_TOKENS * NUM_TOPK];
  float x[NUM_TOKENS * HIDDEN];
  float out[NUM_TOKENS * HIDDEN];
} batch;

static void fill(batch* b, int32_t rank) {
  int i;
  for (i = 0; i < NUM_TOKENS * HIDDEN; ++i) b->x[i] = sinf((float)(i + rank));
  for (i = 0; i < NUM_TOKENS * NUM_TOPK; ++i) {
    b->topk_idx[i] = (3 * i + rank) % NUM_EXPERTS;
    b->topk_weights[i] = i % 2 == 0 ? 0.75F : 0.25F;
  }
}

// The experts work in place, each on its own group of rows.
static void run_experts(const ferry_routing* routing, float* rows) {
  int64_t num_local;
  int64_t local;
  int64_t i;
  const int32_t* ids = ferry_routing_local_expert_ids(routing, &num_local);
  const int64_t* offsets = ferry_routing_expert_row_offsets(routing, NULL);
  for (local = 0; local < num_local; ++local) {
    for (i = offsets[local] * HIDDEN; i < offsets[local + 1] * HIDDEN; ++i) rows[i] = expert(ids[local], rows[i]);
  }
}

// Runs dispatch, experts and combine.
static ferry_status* exchange(ferry_group* group, const ferry_routing* routing, float* rows, batch* b) {
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_combine_input results = {0};
  ferry_combine_output sums = {0};
  ferry_combine_options options = {0};
  ferry_status* status;

  send.struct_size = sizeof(send);
  send.x = matrix(b->x, FERRY_FLOAT32, NUM_TOKENS, HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows, FERRY_FLOAT32, ferry_routing_num_recv_rows(routing), HIDDEN);
  status = ferry_dispatch(group, routing, &send, &receive, NULL, NULL);
  if (status != NULL) return status;

  run_experts(routing, rows);

  results.struct_size = sizeof(results);
  results.x = receive.x;
  sums.struct_size = sizeof(sums);
  sums.x = matrix(b->out, FERRY_FLOAT32, NUM_TOKENS, HIDDEN);
  options.struct_size = sizeof(options);
  options.weighted = 1;
  return ferry_combine(group, routing, &results, &sums, &options, NULL);
}

static ferry_status* run_layer(ferry_group* group, batch* b) {
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_routing* routing = NULL;
  ferry_buffer* rows = NULL;
  ferry_status* status;

  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(b->topk_idx, FERRY_INT64, NUM_TOKENS, NUM_TOPK);
  choice.topk_weights = matrix(b->topk_weights, FERRY_FLOAT32, NUM_TOKENS, NUM_TOPK);
  options.struct_size = sizeof(options);
  options.num_experts = NUM_EXPERTS;
  options.layout = FERRY_LAYOUT_EXPERTS;  // rows grouped by expert
  status = ferry_route(group, &choice, &options, NULL, &routing);
  if (status != NULL) return status;

  // Symmetric memory: the other ranks write into it and read from it without a copy in between.
  status = ferry_group_allocate(group, (uint64_t)ferry_routing_num_recv_rows(routing) * HIDDEN * sizeof(float), &rows);
  if (status == NULL) status = exchange(group, routing, ferry_buffer_data(rows), b);
  if (status == NULL) {
    printf("rank %d of %d: %lld rows\n", (int)ferry_group_rank(group), (int)ferry_group_num_ranks(group),
           (long long)ferry_routing_num_recv_rows(routing));
  }
  ferry_buffer_free(rows);
  ferry_routing_free(routing);
  return status;
}

// Returns the largest difference from computing all experts here.
static float difference(const batch* b) {
  float worst = 0;
  int i;
  for (i = 0; i < NUM_TOKENS * HIDDEN; ++i) {
    float expected = 0;
    int entry;
    for (entry = i / HIDDEN * NUM_TOPK; entry < (i / HIDDEN + 1) * NUM_TOPK; ++entry) {
      expected += b->topk_weights[entry] * expert(b->topk_idx[entry], b->x[i]);
    }
    worst = fmaxf(worst, fabsf(b->out[i] - expected));
  }
  return worst;
}

int main(void) {
  ferry_bootstrap* bootstrap = NULL;
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  batch* b = calloc(1, sizeof(*b));
  ferry_status* status;
  int result = 2;
  if (b == NULL) return result;

  options.struct_size = sizeof(options);
  options.backend = "cpu";  // with GPUs the default would be "cuda", which takes only GPU memory
  status = ferry_bootstrap_create_from_environment(0, &bootstrap);
  if (status == NULL) status = ferry_group_create(bootstrap, &options, &group);
  if (status == NULL) {
    fill(b, ferry_group_rank(group));
    status = run_layer(group, b);
  }
  if (status == NULL) status = ferry_group_destroy(group);
  if (status == NULL) {
    result = difference(b) <= 1e-5F ? 0 : 1;  // sums of two numbers below 8: a few roundings of 2^-21 each
  } else {
    fprintf(stderr, "%s: %s\n", ferry_code_name(ferry_status_code(status)), ferry_status_message(status));
  }
  ferry_status_free(status);
  ferry_group_free(group);
  ferry_bootstrap_free(bootstrap);
  free(b);
  return result;
}

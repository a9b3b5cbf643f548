// A Mixture-of-Experts layer in C, over ranks that are processes and over ranks that are threads.
#include "c/layer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_RANKS = 4 };

static int32_t ranks_per_node = NUM_RANKS;

/// Expects a rail to each other node, used by the layer's rows.
static void check_network(const ferry_group* group) {
  ferry_network_usage* usage = NULL;
  int64_t rail;
  const int64_t num_rails = NUM_RANKS / ranks_per_node - 1;
  expect_ok(ferry_group_network_usage(group, &usage), "ferry_group_network_usage");
  expect(ferry_network_usage_num_rails(usage) == num_rails, "the number of rails");
  expect(strcmp(ferry_network_usage_transport(usage), num_rails == 0 ? "" : "loopback") == 0, "the network");
  for (rail = 0; rail < num_rails; ++rail) {
    const ferry_rail_usage* one = ferry_network_usage_rail(usage, rail);
    expect(one->struct_size == sizeof(*one) && one->sent_bytes > 0 && one->num_messages > 0 && one->route != NULL,
           "the usage of a rail");
    expect(one->rank != ferry_group_rank(group) && (one->rank - ferry_group_rank(group)) % ranks_per_node == 0,
           "the rail peer");
  }
  expect(ferry_network_usage_rail(usage, num_rails) == NULL && ferry_network_usage_rail(usage, -1) == NULL,
         "past the rails");
  ferry_network_usage_free(usage);
}

static void run_group(ferry_bootstrap* bootstrap) {
  ferry_group_options options = {0};
  ferry_topology topology = {0};
  ferry_group* group = NULL;
  int64_t times_ns[NUM_RANKS];
  layer made;

  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.timeout_ns = 60000000000;
  options.ranks_per_node = ranks_per_node;
  if (ranks_per_node < NUM_RANKS) options.transport = "loopback";
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  expect(strcmp(ferry_group_backend(group), "cpu") == 0, "the backend");
  topology.struct_size = sizeof(topology);
  expect_ok(ferry_group_topology(group, &topology), "ferry_group_topology");
  expect(topology.struct_size == sizeof(topology) && topology.rank == ferry_bootstrap_rank(bootstrap) &&
             topology.num_ranks == NUM_RANKS && topology.ranks_per_node == ranks_per_node &&
             topology.num_nodes == NUM_RANKS / ranks_per_node,
         "the topology");

  made = make_layer(group);
  run_experts_layout(&made, 0);
  run_experts_layout(&made, 1);
  run_tokens_layout(&made);
  run_fp8_combine(&made);
  run_latency_mode(&made, 0);
  run_latency_mode(&made, 1);
  free_layer(&made);
  expect_ok(ferry_group_wait_times_ns(group, times_ns, NUM_RANKS), "ferry_group_wait_times_ns");
  expect(times_ns[topology.rank] == 0, "no rank waits for itself");
  check_network(group);
  expect_ok(ferry_group_trim(group), "ferry_group_trim");
  expect_ok(ferry_group_wait(group, NULL), "ferry_group_wait");
  expect_ok(ferry_group_poll(group), "ferry_group_poll");
  expect_ok(ferry_group_destroy(group), "ferry_group_destroy");
  ferry_group_free(group);
}

/// Expects symmetric memory to match ferry_bytes_required.
static void check_memory(ferry_bootstrap* bootstrap) {
  enum { TOKENS = 8, ROW_BYTES = LAYER_HIDDEN * sizeof(float) };
  ferry_group_options options = {0};
  ferry_memory_usage usage = {0};
  ferry_memory_shape shape = {0};
  ferry_group* group = NULL;
  ferry_buffer* buffer = NULL;
  uint64_t required = 0;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  usage.struct_size = sizeof(usage);
  expect_ok(ferry_group_memory_usage(group, &usage), "ferry_group_memory_usage");
  shape.struct_size = sizeof(shape);
  shape.num_ranks = NUM_RANKS;
  shape.num_experts = NUM_RANKS;
  shape.num_topk = 1;
  shape.row_bytes = ROW_BYTES;
  shape.plain_memory = 1;
  expect_ok(ferry_bytes_required(&shape, &required), "ferry_bytes_required");
  expect(required >= usage.total_bytes && usage.allocated_bytes == 0, "the memory of an empty batch");

  expect_ok(ferry_group_allocate(group, 1, &buffer), "ferry_group_allocate");
  expect(ferry_buffer_num_bytes(buffer) >= 1 && *(char*)ferry_buffer_data(buffer) == 0, "the buffer");
  expect_ok(ferry_group_memory_usage(group, &usage), "ferry_group_memory_usage");
  expect(usage.allocated_bytes >= 1 && usage.total_bytes == usage.control_bytes + usage.network_bytes +
                                                                usage.staging_bytes + usage.allocated_bytes,
         "the memory after allocate");
  ferry_group_free(group);
  *(char*)ferry_buffer_data(buffer) = 1;  // the buffer outlives the group
  ferry_buffer_free(buffer);
}

static int run_process(ferry_bootstrap* bootstrap) {
  int32_t mine = 10 + ferry_bootstrap_rank(bootstrap);
  int32_t all[NUM_RANKS];
  int32_t rank;
  expect_ok(ferry_bootstrap_all_gather(bootstrap, &mine, sizeof(mine), all, 0), "ferry_bootstrap_all_gather");
  for (rank = 0; rank < ferry_bootstrap_num_ranks(bootstrap); ++rank) expect(all[rank] == 10 + rank, "all_gather");
  run_group(bootstrap);
  check_memory(bootstrap);
  return 0;
}

static void* run_thread(void* bootstrap) {
  run_group(bootstrap);
  ferry_bootstrap_free(bootstrap);
  return NULL;
}

static void run_threads(ferry_bootstrap** bootstraps) {
  pthread_t threads[NUM_RANKS];
  int32_t rank;
  for (rank = 0; rank < NUM_RANKS; ++rank) {
    expect(pthread_create(&threads[rank], NULL, run_thread, bootstraps[rank]) == 0, "pthread_create");
  }
  for (rank = 0; rank < NUM_RANKS; ++rank) expect(pthread_join(threads[rank], NULL) == 0, "pthread_join");
}

/// All-gather of the test program itself, over threads.
static struct {
  pthread_barrier_t barrier;
  const void* mine[NUM_RANKS];
} table;

static int32_t gather(void* user, const void* mine, uint64_t num_bytes, void* all, int64_t timeout_ns) {
  int32_t rank;
  expect(timeout_ns > 0, "the deadline of the callback");
  table.mine[*(const int32_t*)user] = mine;
  pthread_barrier_wait(&table.barrier);
  for (rank = 0; rank < NUM_RANKS; ++rank) memcpy((char*)all + (size_t)rank * num_bytes, table.mine[rank], num_bytes);
  pthread_barrier_wait(&table.barrier);
  return FERRY_OK;
}

static void run_callbacks(void) {
  ferry_bootstrap* bootstraps[NUM_RANKS];
  int32_t ranks[NUM_RANKS];
  int32_t rank;
  expect(pthread_barrier_init(&table.barrier, NULL, NUM_RANKS) == 0, "pthread_barrier_init");
  for (rank = 0; rank < NUM_RANKS; ++rank) {
    ferry_callback_options options = {0};
    ranks[rank] = rank;
    options.struct_size = sizeof(options);
    options.all_gather = gather;
    options.user = &ranks[rank];
    options.rank = rank;
    options.num_ranks = NUM_RANKS;
    expect_ok(ferry_bootstrap_create_callback(&options, &bootstraps[rank]), "ferry_bootstrap_create_callback");
  }
  run_threads(bootstraps);
  pthread_barrier_destroy(&table.barrier);
}

int main(int argc, char** argv) {
  const char* way = argc > 1 ? argv[1] : "";
  ferry_bootstrap* bootstraps[NUM_RANKS];
  if (strcmp(way, "processes") == 0) {
    expect(run_processes(NUM_RANKS, run_process) == NUM_RANKS, "a rank");
  } else if (strcmp(way, "threads") == 0 || strcmp(way, "nodes") == 0) {
    if (strcmp(way, "nodes") == 0) ranks_per_node = 2;
    expect_ok(ferry_bootstrap_create_in_process(NUM_RANKS, bootstraps), "ferry_bootstrap_create_in_process");
    run_threads(bootstraps);
  } else if (strcmp(way, "callbacks") == 0) {
    run_callbacks();
  } else {
    expect(0, "usage: layer_test processes|threads|nodes|callbacks");
  }
  printf("layer_test %s: ok\n", way);
  return 0;
}

// Load over a window of calls: counts of the ranks, and their sums.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "c/check.h"

enum { NUM_RANKS = 2, LAYERS = 2, EXPERTS = 3, PHYSICAL = 4, TOKENS = 3 };

/// Makes two routes of a layer in which the first expert has two homes.
static void route(ferry_group* group, ferry_load_window* window, int64_t layer) {
  static const int32_t kHomes[PHYSICAL] = {0, 1, 2, 0};
  int64_t topk_idx[TOKENS] = {0, 0, 2};
  ferry_route_input input = {0};
  ferry_route_options options = {0};
  ferry_placement placement = {0};
  ferry_load_counters counters = {0};
  int call;
  const int64_t num_tokens = ferry_group_rank(group) == 0 ? TOKENS : 1;
  placement.struct_size = sizeof(placement);
  placement.physical_to_logical = kHomes;
  placement.num_physical_experts = PHYSICAL;
  counters.struct_size = sizeof(counters);
  expect_ok(ferry_load_window_counters(window, layer, &counters), "ferry_load_window_counters");
  input.struct_size = sizeof(input);
  input.topk_idx = matrix(topk_idx, FERRY_INT64, num_tokens, 1);
  options.struct_size = sizeof(options);
  options.num_experts = EXPERTS;
  options.placement = &placement;
  options.counters = &counters;
  for (call = 0; call < 2; ++call) {
    ferry_routing* routing = NULL;
    expect_ok(ferry_route(group, &input, &options, NULL, &routing), "ferry_route");
    ferry_routing_free(routing);
  }
}

static void expect_counts(const int64_t* counts, int64_t num, const int64_t* expected, size_t num_expected,
                          const char* what) {
  expect(num == (int64_t)num_expected && memcmp(counts, expected, num_expected * sizeof(*expected)) == 0, what);
}

static void check_summary(const ferry_load_summary* load) {
  // Rank 0 picks the home on its own rank for its two tokens, and rank 1 its own for its one token.
  static const int64_t kLogical[LAYERS * EXPERTS] = {0, 0, 0, 6, 0, 2};
  static const int64_t kPhysical[LAYERS * PHYSICAL] = {0, 0, 0, 0, 4, 0, 2, 2};
  const int64_t* waits;
  int64_t num = 0;
  const int64_t* counts = ferry_load_summary_logical(load, &num);
  expect_counts(counts, num, kLogical, sizeof(kLogical) / sizeof(*kLogical), "the sum of logical experts");
  counts = ferry_load_summary_physical(load, &num);
  expect_counts(counts, num, kPhysical, sizeof(kPhysical) / sizeof(*kPhysical), "the sum of physical experts");
  waits = ferry_load_summary_wait_times_ns(load, &num);
  expect(num == NUM_RANKS * NUM_RANKS && waits[0] == 0 && waits[3] == 0, "no rank waits for itself");
  expect(strstr(ferry_load_summary_json(load), "\"logical\":[[0,0,0],[6,0,2]]") != NULL, "the text");
}

static void check_wrong(ferry_bootstrap* bootstrap, ferry_load_window* window) {
  int64_t counts[LAYERS * EXPERTS] = {0};
  ferry_load_counters counters = {0};
  ferry_load_window* none = NULL;
  ferry_load_summary* load = NULL;
  counters.struct_size = sizeof(counters);
  expect_error(ferry_load_window_create(0, EXPERTS, 0, &none), FERRY_ERROR_INVALID_ARGUMENT, -1, "num_layers is 0");
  expect_error(ferry_load_window_create(1, EXPERTS, 0, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_load_window_counters(window, LAYERS, &counters), FERRY_ERROR_INVALID_ARGUMENT, -1, "layer is 2");
  expect_error(ferry_load_window_counters(window, -1, &counters), FERRY_ERROR_INVALID_ARGUMENT, -1, "layer is -1");
  expect_error(ferry_load_window_counters(window, 0, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_load_window_counters(NULL, 0, &counters), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect(counters.logical.num_dims == 0, "failed calls write nothing");
  expect_error(ferry_load_window_add(window, counts, 1, NULL, 0), FERRY_ERROR_INVALID_ARGUMENT, -1, "1 entries");
  expect_error(ferry_load_window_add(window, NULL, 6, NULL, 0), FERRY_ERROR_INVALID_ARGUMENT, -1, "logical is null");
  expect_error(ferry_load_window_add(window, counts, 6, counts, -1), FERRY_ERROR_INVALID_ARGUMENT, -1, "negative");
  expect_error(ferry_load_window_add(NULL, counts, 6, NULL, 0), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_load_window_reset(NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_load_window_sum(window, NULL, NULL, 0, 0, &load), FERRY_ERROR_INVALID_ARGUMENT, -1, "bootstrap");
  expect_error(ferry_load_window_sum(NULL, bootstrap, NULL, 0, 0, &load), FERRY_ERROR_INVALID_ARGUMENT, -1, "window");
  expect_error(ferry_load_window_sum(window, bootstrap, NULL, 0, 0, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  // The same on every rank: this error is found after the ranks have met.
  expect_error(ferry_load_window_sum(window, bootstrap, counts, 1, 0, &load), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "has 1 entries, expected one for each of 2 ranks");
  expect(none == NULL && load == NULL, "failed calls write nothing");
  ferry_load_window_free(NULL);
  ferry_load_summary_free(NULL);
  expect(ferry_load_window_logical(NULL, NULL) == NULL && ferry_load_summary_physical(NULL, NULL) == NULL &&
             *ferry_load_summary_json(NULL) == 0,
         "arrays of no window or summary");
}

static void check_network(const ferry_group* group) {
  ferry_network_usage* usage = NULL;
  expect_ok(ferry_group_network_usage(group, &usage), "ferry_group_network_usage");
  expect(ferry_network_usage_num_rails(usage) == 0 && *ferry_network_usage_transport(usage) == 0 &&
             *ferry_network_usage_ring_memory(usage) == 0 && *ferry_network_usage_why_host_memory(usage) == 0 &&
             ferry_network_usage_rail(usage, 0) == NULL,
         "the network of one node");
  expect(ferry_network_usage_service_level(usage) == -1 && ferry_network_usage_num_paths(usage) == 0,
         "the settings of no card");
  ferry_network_usage_free(usage);
  ferry_network_usage_free(NULL);
  expect_error(ferry_group_network_usage(NULL, &usage), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_group_network_usage(group, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect(ferry_network_usage_num_rails(NULL) == 0 && *ferry_network_usage_net_devices(NULL) == 0, "no network usage");
}

static void* run_rank(void* given) {
  ferry_bootstrap* bootstrap = given;
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  ferry_load_window* window = NULL;
  ferry_load_summary* load = NULL;
  int64_t waits[NUM_RANKS];
  int64_t counts[LAYERS * EXPERTS] = {1, 2, 3, 4, 5, 6};
  int64_t num = 0;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.arena_bytes = 1 << 24;
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  expect_ok(ferry_load_window_create(LAYERS, EXPERTS, PHYSICAL, &window), "ferry_load_window_create");
  route(group, window, 1);
  expect_ok(ferry_group_wait_times_ns(group, waits, NUM_RANKS), "ferry_group_wait_times_ns");
  expect_ok(ferry_load_window_sum(window, bootstrap, waits, NUM_RANKS, 0, &load), "ferry_load_window_sum");
  check_summary(load);
  check_wrong(bootstrap, window);
  check_network(group);

  expect_ok(ferry_load_window_reset(window), "ferry_load_window_reset");
  expect_ok(ferry_load_window_add(window, counts, LAYERS * EXPERTS, NULL, 0), "ferry_load_window_add");
  expect(ferry_load_window_logical(window, &num)[5] == 6 && num == LAYERS * EXPERTS, "the counts that were added");
  expect(ferry_load_window_physical(window, &num)[4] == 0 && num == LAYERS * PHYSICAL, "a new window");
  check_summary(load);  // keeps its own counts after the reset
  ferry_load_window_free(window);
  ferry_load_summary_free(load);
  expect_ok(ferry_group_destroy(group), "ferry_group_destroy");
  expect_error(ferry_group_wait_times_ns(group, waits, NUM_RANKS), FERRY_ERROR_INVALID_ARGUMENT, -1, "destroyed");
  ferry_group_free(group);
  ferry_bootstrap_free(bootstrap);
  return NULL;
}

int main(void) {
  ferry_bootstrap* bootstraps[NUM_RANKS];
  pthread_t threads[NUM_RANKS];
  int32_t rank;
  expect_ok(ferry_bootstrap_create_in_process(NUM_RANKS, bootstraps), "ferry_bootstrap_create_in_process");
  for (rank = 0; rank < NUM_RANKS; ++rank) {
    expect(pthread_create(&threads[rank], NULL, run_rank, bootstraps[rank]) == 0, "pthread_create");
  }
  for (rank = 0; rank < NUM_RANKS; ++rank) expect(pthread_join(threads[rank], NULL) == 0, "pthread_join");
  return 0;
}

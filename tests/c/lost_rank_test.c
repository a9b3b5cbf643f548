// A rank process dies between two calls, or its program ends its wait: the other ranks get the typed error that names
// it.
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "c/layer.h"

enum { NUM_RANKS = 3, LOST_RANK = 2, INTERRUPTED_RANK = 1, LATE_RANK = 2 };

static ferry_group* make_group(ferry_bootstrap* bootstrap, ferry_interrupted interrupted, void* user) {
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.timeout_ns = 60000000000;
  options.interrupted = interrupted;
  options.interrupted_user = user;
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  return group;
}

static ferry_status* route(ferry_group* group) {
  int64_t topk_idx = 0;
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_routing* routing = NULL;
  ferry_status* status;
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(&topk_idx, FERRY_INT64, 1, 1);
  options.struct_size = sizeof(options);
  options.num_experts = NUM_RANKS;
  status = ferry_route(group, &choice, &options, NULL, &routing);
  expect((routing == NULL) == (status != NULL), "a routing if and only if the call succeeded");
  ferry_routing_free(routing);
  return status;
}

static void leave(ferry_group* group) {
  ferry_status_free(ferry_group_destroy(group));
  ferry_group_free(group);
}

static int run_rank(ferry_bootstrap* bootstrap) {
  ferry_group* group = make_group(bootstrap, NULL, NULL);
  layer made = make_layer(group);
  run_experts_layout(&made, 0);
  free_layer(&made);
  if (ferry_group_rank(group) == LOST_RANK) kill(getpid(), SIGKILL);

  expect_error(route(group), FERRY_ERROR_PEER_LOST, LOST_RANK, "route");
  expect_error(route(group), FERRY_ERROR_PEER_LOST, LOST_RANK, "");
  leave(group);
  return 0;
}

static int32_t wants_end(void* user) { return *(const int32_t*)user; }

// The last rank makes its call after all others have their errors.
static int run_interrupted_rank(ferry_bootstrap* bootstrap) {
  int32_t ends = 0;
  int32_t all[NUM_RANKS];
  const int32_t rank = ferry_bootstrap_rank(bootstrap);
  ferry_group* group = make_group(bootstrap, rank == INTERRUPTED_RANK ? wants_end : NULL, &ends);
  ferry_status* status;
  expect_ok(route(group), "route");
  ends = 1;
  if (rank == LATE_RANK) expect_ok(ferry_bootstrap_all_gather(bootstrap, &rank, sizeof(rank), all, 0), "meet");
  status = route(group);
  // The others may have done their parts of the call already.
  if (status == NULL && rank == LATE_RANK) status = route(group);
  expect_error(status, FERRY_ERROR_PEER_LOST, INTERRUPTED_RANK, "waits no longer");
  if (rank != LATE_RANK) expect_ok(ferry_bootstrap_all_gather(bootstrap, &rank, sizeof(rank), all, 0), "meet");
  expect_ok(ferry_bootstrap_all_gather(bootstrap, &rank, sizeof(rank), all, 0), "keep the groups until then");
  leave(group);
  return 0;
}

int main(void) {
  expect(run_processes(NUM_RANKS, run_rank) == NUM_RANKS - 1, "a survivor");
  expect(run_processes(NUM_RANKS, run_interrupted_rank) == NUM_RANKS, "a rank of a group that is interrupted");
  printf("lost_rank_test: ok\n");
  return 0;
}

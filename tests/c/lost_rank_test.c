// A rank process dies between two calls: the others get the typed error that names it, and go on without it.
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "c/layer.h"

enum { NUM_RANKS = 3, LOST_RANK = 2 };

static ferry_group* make_group(ferry_bootstrap* bootstrap) {
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.timeout_ns = 60000000000;
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  return group;
}

static int run_rank(ferry_bootstrap* bootstrap) {
  int64_t topk_idx = 0;
  ferry_group* group = make_group(bootstrap);
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_routing* routing = NULL;
  ferry_status* status;
  layer made = make_layer(group);
  run_experts_layout(&made, 0);
  free_layer(&made);
  if (ferry_group_rank(group) == LOST_RANK) kill(getpid(), SIGKILL);

  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(&topk_idx, FERRY_INT64, 1, 1);
  options.struct_size = sizeof(options);
  options.num_experts = NUM_RANKS;
  status = ferry_route(group, &choice, &options, NULL, &routing);
  expect(routing == NULL, "no routing where the call failed");
  expect_error(status, FERRY_ERROR_PEER_LOST, LOST_RANK, "route");
  expect_error(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_PEER_LOST, LOST_RANK, "");
  ferry_status_free(ferry_group_destroy(group));
  ferry_group_free(group);
  return 0;
}

int main(void) {
  expect(run_processes(NUM_RANKS, run_rank) == NUM_RANKS - 1, "a survivor");
  printf("lost_rank_test: ok\n");
  return 0;
}

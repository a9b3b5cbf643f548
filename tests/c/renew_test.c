// A rank of a group is killed. The others agree, renew the group and go on without its expert; then a thread of another
// process takes its place.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "c/check.h"

enum { NUM_RANKS = 3, LOST_RANK = 1, NUM_STEPS = 4, HIDDEN = 8 };

static const char* const kSecret = "of the group";
static const int64_t kLongNs = 60000000000;

static ferry_group_options options_of_group(void) {
  ferry_group_options options = {0};
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.timeout_ns = options.mask_timeout_ns = kLongNs;
  options.mask_lost_ranks = 1;
  return options;
}

/// Each rank has one token, which goes to the one expert of each rank; expert e multiplies by e + 1. Returns the sum of
/// the factors, the same for all numbers of the token.
static int run_step(ferry_group* group) {
  const int32_t rank = ferry_group_rank(group);
  int32_t topk_idx[NUM_RANKS];
  float weights[NUM_RANKS];
  float x[HIDDEN], rows[NUM_RANKS * HIDDEN], out[HIDDEN];
  ferry_latency_dispatch_input send = {0};
  ferry_latency_dispatch_output receive = {0};
  ferry_latency_dispatch_options options = {0};
  ferry_latency_combine_input results = {0};
  ferry_latency_combine_output sums = {0};
  ferry_routing* routing = NULL;
  int i;
  for (i = 0; i < NUM_RANKS; ++i) topk_idx[i] = i, weights[i] = 1;
  for (i = 0; i < HIDDEN; ++i) x[i] = (float)(rank + i + 1);
  send.struct_size = sizeof(send);
  send.x = matrix(x, FERRY_FLOAT32, 1, HIDDEN);
  send.topk_idx = matrix(topk_idx, FERRY_INT32, 1, NUM_RANKS);
  send.topk_weights = matrix(weights, FERRY_FLOAT32, 1, NUM_RANKS);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows, FERRY_FLOAT32, NUM_RANKS, HIDDEN);
  options.struct_size = sizeof(options);
  options.num_experts = options.slab_capacity = NUM_RANKS;
  options.max_tokens = 1;
  expect_ok(ferry_latency_dispatch(group, &send, &receive, &options, NULL, &routing), "ferry_latency_dispatch");
  for (i = 0; i < NUM_RANKS * HIDDEN; ++i) rows[i] *= (float)(rank + 1);
  results.struct_size = sizeof(results);
  results.x = receive.x;
  sums.struct_size = sizeof(sums);
  sums.x = matrix(out, FERRY_FLOAT32, 1, HIDDEN);
  expect_ok(ferry_latency_combine(group, routing, &results, &sums, NULL, NULL), "ferry_latency_combine");
  ferry_routing_free(routing);
  for (i = 1; i < HIDDEN; ++i) expect(out[i] * x[0] == out[0] * x[i], "a number of the token");
  return (int)(out[0] / x[0]);
}

static void check_step(ferry_group* group, int expected, int32_t absent) {
  int32_t masked[NUM_RANKS] = {0};
  ferry_tensor tensor = matrix(masked, FERRY_INT32, NUM_RANKS, 0);
  int32_t rank;
  tensor.num_dims = 1;
  expect(run_step(group) == expected, "the experts of the ranks that are present");
  expect_ok(ferry_latency_query_mask(group, &tensor, NULL), "ferry_latency_query_mask");
  for (rank = 0; rank < NUM_RANKS; ++rank) expect(masked[rank] == (rank == absent), "masks of the absent rank alone");
}

static ferry_membership_view view_of(const ferry_membership* members) {
  ferry_membership_view view = {0};
  view.struct_size = sizeof(view);
  expect_ok(ferry_membership_get_view(members, &view), "ferry_membership_get_view");
  return view;
}

static ferry_bootstrap* bootstrap_of(ferry_membership* members) {
  ferry_bootstrap* bootstrap = NULL;
  expect_ok(ferry_membership_bootstrap(members, &bootstrap), "ferry_membership_bootstrap");
  return bootstrap;
}

/// Renews the group for the members' view. Rank 0 first passes a list that cannot be read: no rank waits for it.
static void renew(ferry_group* group, ferry_membership* members) {
  const ferry_membership_view view = view_of(members);
  ferry_bootstrap* bootstrap = bootstrap_of(members);
  const int wrong = ferry_group_rank(group) == 0;
  expect_error(ferry_group_renew(group, bootstrap, view.ids, wrong ? -1 : view.num_ranks), FERRY_ERROR_INVALID_ARGUMENT,
               wrong ? -1 : 0, wrong ? "with length -1" : "present_ranks");
  expect_ok(ferry_group_renew(group, bootstrap, view.ids, view.num_ranks), "ferry_group_renew");
  ferry_bootstrap_free(bootstrap);
}

/// Agrees with the others on a view without the lost rank.
static void go_on(ferry_group* group, ferry_membership* members) {
  int32_t silent[NUM_RANKS] = {-1, -1, -1};
  int64_t num_silent = -1;
  ferry_buffer* buffer = NULL;
  ferry_next_view_options options = {0};
  expect_error(ferry_group_suspend(group, silent, NUM_RANKS - 1, &num_silent), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "expected room");
  expect_ok(ferry_group_suspend(group, silent, NUM_RANKS, &num_silent), "ferry_group_suspend");
  expect(num_silent == 1 && silent[0] == LOST_RANK, "the silent rank");
  expect_error(ferry_group_suspend(group, silent, NUM_RANKS, &num_silent), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "suspended");
  expect_error(ferry_group_allocate(group, 1, &buffer), FERRY_ERROR_INVALID_ARGUMENT, -1, "suspended");
  options.struct_size = sizeof(options);
  options.silent_ids = silent;
  options.num_silent_ids = -1;
  expect_error(ferry_membership_next_view(members, &options), FERRY_ERROR_INVALID_ARGUMENT, -1, "with length -1");
  options.num_silent_ids = (int32_t)num_silent;
  expect_ok(ferry_membership_next_view(members, &options), "ferry_membership_next_view");
  expect(view_of(members).num_ranks == NUM_RANKS - 1 && view_of(members).lost_ids[0] == LOST_RANK, "the lost member");
}

/// Takes the place of the lost rank.
static void* run_replacement(void* contact) {
  const char* contacts[1];
  ferry_join_options joining = {0};
  ferry_group_options options = options_of_group();
  ferry_membership* members = NULL;
  ferry_membership_view view;
  ferry_bootstrap* bootstrap;
  ferry_group* group = NULL;
  contacts[0] = (const char*)contact;
  joining.struct_size = sizeof(joining);
  joining.contacts = contacts;
  joining.num_contacts = 1;
  joining.secret = kSecret;
  joining.use_id = 1;
  joining.id = LOST_RANK;
  expect_ok(ferry_membership_join(&joining, &members), "ferry_membership_join");
  view = view_of(members);
  bootstrap = bootstrap_of(members);
  options.num_ranks = NUM_RANKS;
  options.present_ranks = view.ids;
  options.num_present_ranks = view.num_ranks;
  // Rank 0 first passes a list that cannot be read, which all ranks refuse.
  expect_code(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, "a refused creation");
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  ferry_bootstrap_free(bootstrap);
  expect(ferry_group_rank(group) == LOST_RANK && ferry_group_num_ranks(group) == NUM_RANKS, "the place in the group");
  check_step(group, 6, -1);
  expect_ok(ferry_group_destroy(group), "ferry_group_destroy");
  ferry_group_free(group);
  ferry_membership_free(members);
  return NULL;
}

static int run_rank(ferry_bootstrap* bootstrap) {
  const int32_t rank = ferry_bootstrap_rank(bootstrap);
  ferry_group_options options = options_of_group();
  ferry_membership_options membership = {0};
  ferry_membership* members = NULL;
  ferry_group* group = NULL;
  pthread_t replacement;
  int step;
  membership.struct_size = sizeof(membership);
  membership.secret = kSecret;
  membership.timeout_ns = kLongNs;
  expect_ok(ferry_membership_create(bootstrap, &membership, &members), "ferry_membership_create");
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  for (step = 0; step < NUM_STEPS; ++step) check_step(group, 6, -1);
  if (rank == LOST_RANK) kill(getpid(), SIGKILL);

  (void)run_step(group);  // one rank may leave while the other is in this step, which does not count then
  go_on(group, members);
  renew(group, members);
  for (step = 0; step < NUM_STEPS; ++step) check_step(group, 4, LOST_RANK);

  if (rank == 0) {
    expect(pthread_create(&replacement, NULL, run_replacement, (void*)ferry_membership_address(members)) == 0,
           "pthread_create");
    while (ferry_membership_num_waiting(members) == 0) sched_yield();
  }
  expect_ok(ferry_membership_next_view(members, NULL), "ferry_membership_next_view");
  renew(group, members);  // between calls, without a suspension
  check_step(group, 6, -1);
  expect_ok(ferry_group_destroy(group), "ferry_group_destroy");
  ferry_group_free(group);
  if (rank == 0) expect(pthread_join(replacement, NULL) == 0, "pthread_join");
  ferry_membership_free(members);
  return 0;
}

/// Creates a group of three ranks of which one is present. It goes on alone, and some of its arguments are wrong.
static void check_bad_input(void) {
  ferry_group_options options = options_of_group();
  ferry_bootstrap* bootstrap = NULL;
  ferry_group* group = NULL;
  int32_t present[2] = {LOST_RANK, 2};
  int32_t silent[NUM_RANKS] = {7, 7, 7};
  int64_t num_silent = -1;
  expect_error(ferry_group_suspend(NULL, silent, 3, &num_silent), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_group_renew(NULL, NULL, present, 1), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_ok(ferry_bootstrap_create_in_process(1, &bootstrap), "ferry_bootstrap_create_in_process");
  options.num_ranks = NUM_RANKS;
  expect_error(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, -1, "num_ranks is 3");
  options.num_present_ranks = 1;
  expect_error(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, -1, "present_ranks");
  options.present_ranks = present;
  options.num_present_ranks = 2;
  expect_error(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, -1, "[1, 2]");
  options.num_present_ranks = 1;
  expect(group == NULL, "no group from refused creations");
  options.mask_lost_ranks = 0;
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create without masks");
  expect(run_step(group) == LOST_RANK + 1, "its own expert without masks");
  ferry_group_free(group);
  group = NULL;
  options.mask_lost_ranks = 1;
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  expect(run_step(group) == LOST_RANK + 1, "its own expert");
  expect_error(ferry_group_renew(group, NULL, present, 1), FERRY_ERROR_INVALID_ARGUMENT, -1, "bootstrap is null");
  expect_error(ferry_group_suspend(group, NULL, NUM_RANKS, &num_silent), FERRY_ERROR_INVALID_ARGUMENT, -1, "room");
  expect_error(ferry_group_suspend(group, silent, NUM_RANKS, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "room");
  expect(num_silent == -1 && silent[0] == 7, "untouched by refused calls");
  expect(run_step(group) == LOST_RANK + 1, "refused calls change nothing");
  expect_ok(ferry_group_suspend(group, silent, NUM_RANKS, &num_silent), "ferry_group_suspend");
  expect(num_silent == 0, "absent ranks are not silent");
  expect_code(ferry_group_renew(group, bootstrap, present + 1, 1), FERRY_ERROR_INVALID_ARGUMENT, "another rank");
  expect_code(ferry_group_renew(group, bootstrap, NULL, 1), FERRY_ERROR_INVALID_ARGUMENT, "a list that is null");
  expect_ok(ferry_group_renew(group, bootstrap, present, 1), "ferry_group_renew");
  expect(run_step(group) == LOST_RANK + 1, "its own expert");
  ferry_group_free(group);
  ferry_bootstrap_free(bootstrap);
}

int main(void) {
  check_bad_input();
  expect(run_processes(NUM_RANKS, run_rank) == NUM_RANKS - 1, "a rank that goes on");
  printf("renew_test: ok\n");
  return 0;
}

// Members of a program: one is killed, another process takes its place, one leaves; the views say so, and groups of
// each view work.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "c/layer.h"

enum { NUM_RANKS = 3, LOST_RANK = 1, NUM_STEPS = 5 };

static const char* const kSecret = "of the members";
static const int64_t kLongNs = 60000000000;

static ferry_membership* create(ferry_bootstrap* bootstrap) {
  ferry_membership_options options = {0};
  ferry_membership* members = NULL;
  options.struct_size = sizeof(options);
  options.secret = kSecret;
  options.timeout_ns = kLongNs;
  expect_ok(ferry_membership_create(bootstrap, &options, &members), "ferry_membership_create");
  return members;
}

static ferry_membership_view view_of(const ferry_membership* members) {
  ferry_membership_view view = {0};
  view.struct_size = sizeof(view);
  expect_ok(ferry_membership_get_view(members, &view), "ferry_membership_get_view");
  return view;
}

static int is(const int32_t* elements, int32_t num, int32_t first, int32_t second) {
  return num == 2 && elements[0] == first && elements[1] == second;
}

/// A layer over the members of the view.
static void run_layer(ferry_membership* members) {
  const ferry_membership_view view = view_of(members);
  ferry_bootstrap* bootstrap = NULL;
  ferry_bootstrap* again = NULL;
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  layer made;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.timeout_ns = kLongNs;
  expect_ok(ferry_membership_bootstrap(members, &bootstrap), "ferry_membership_bootstrap");
  expect_ok(ferry_membership_bootstrap(members, &again), "the bootstrap once more");
  ferry_bootstrap_free(again);
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  ferry_bootstrap_free(bootstrap);
  expect(ferry_group_rank(group) == view.rank && ferry_group_num_ranks(group) == view.num_ranks, "ranks of the view");
  made = make_layer(group);
  run_experts_layout(&made, 0);
  free_layer(&made);
  expect_ok(ferry_group_destroy(group), "ferry_group_destroy");
  ferry_group_free(group);
}

/// One rank is killed, and then one leaves.
static int run_rank(ferry_bootstrap* bootstrap) {
  const int32_t rank = ferry_bootstrap_rank(bootstrap);
  ferry_membership* members = create(bootstrap);
  ferry_next_view_options leaving = {0};
  ferry_membership_view view = view_of(members);
  expect(view.epoch == 0 && view.rank == rank && view.num_ranks == NUM_RANKS && view.ids[2] == 2, "the first view");
  expect(view.lost_ids == NULL && view.num_lost_ids == 0 && view.joined_ids == NULL, "empty arrays");
  run_layer(members);
  expect_ok(ferry_membership_complete_steps(members, (uint64_t)(NUM_STEPS + rank)), "complete_steps");
  if (rank == LOST_RANK) kill(getpid(), SIGKILL);

  expect_ok(ferry_membership_next_view(members, NULL), "next_view");
  view = view_of(members);
  expect(view.epoch == 1 && view.num_complete_steps == NUM_STEPS, "all go on from the step that all have completed");
  expect(is(view.ids, view.num_ranks, 0, 2) && is(view.kept_ranks, view.num_kept_ranks, 0, 2), "members that are left");
  expect(view.num_lost_ids == 1 && view.lost_ids[0] == LOST_RANK && view.num_joined_ids == 0, "the lost member");
  run_layer(members);

  leaving.struct_size = sizeof(leaving);
  leaving.leave = rank == 0;
  expect_ok(ferry_membership_next_view(members, &leaving), "next_view");
  view = view_of(members);
  expect(view.num_ranks == 1 && view.ids[0] == 2 && view.rank == (rank == 0 ? -1 : 0), "one has left");
  if (rank == 0) {
    expect_code(ferry_membership_next_view(members, NULL), FERRY_ERROR_PEER_LOST, "next_view after leaving");
    expect(view_of(members).epoch == 2, "the view stays as it was");
  } else {
    run_layer(members);
  }
  ferry_membership_free(members);
  return 0;
}

static int32_t ask(void* user) { return ++*(int32_t*)user; }

static void* run_joiner(void* contact) {
  const char* contacts[1];
  ferry_join_options options = {0};
  ferry_membership* members = NULL;
  contacts[0] = (const char*)contact;
  options.struct_size = sizeof(options);
  options.contacts = contacts;
  options.num_contacts = 1;
  options.secret = kSecret;
  options.use_id = 1;
  options.id = 7;
  options.timeout_ns = kLongNs;
  expect_ok(ferry_membership_join(&options, &members), "ferry_membership_join");
  expect(is(view_of(members).ids, view_of(members).num_ranks, 0, 7) && view_of(members).rank == 1, "the joiner's view");
  run_layer(members);
  ferry_membership_free(members);
  return NULL;
}

/// A member lets another one in, both threads of this process, and accuses it.
static void check_joining(void) {
  ferry_bootstrap* bootstrap = NULL;
  ferry_membership* members;
  ferry_membership_view view;
  pthread_t joiner;
  expect_ok(ferry_bootstrap_create_in_process(1, &bootstrap), "ferry_bootstrap_create_in_process");
  members = create(bootstrap);
  ferry_bootstrap_free(bootstrap);
  expect(strncmp(ferry_membership_address(members), "127.0.0.1:", 10) == 0, "the address");
  expect(pthread_create(&joiner, NULL, run_joiner, (void*)ferry_membership_address(members)) == 0, "pthread_create");
  while (ferry_membership_num_waiting(members) == 0) sched_yield();
  expect_ok(ferry_membership_next_view(members, NULL), "next_view");
  view = view_of(members);
  expect(is(view.ids, view.num_ranks, 0, 7) && view.num_joined_ids == 1 && view.joined_ids[0] == 7, "who joined");
  expect(ferry_membership_num_awaiting(members) == 0, "none waits in next_view");
  run_layer(members);
  expect(pthread_join(joiner, NULL) == 0, "pthread_join");
  ferry_membership_free(members);
}

/// The program ends waits that would last.
static int run_interrupted_rank(ferry_bootstrap* bootstrap) {
  ferry_membership_options options = {0};
  ferry_membership* members = NULL;
  ferry_join_options joining = {0};
  const char* contacts[1];
  int32_t num_asked = 0;
  int32_t all[2];
  options.struct_size = sizeof(options);
  options.secret = kSecret;
  options.timeout_ns = kLongNs;
  options.interrupted = ask;
  options.interrupted_user = &num_asked;
  expect_ok(ferry_membership_create(bootstrap, &options, &members), "ferry_membership_create");
  if (ferry_bootstrap_rank(bootstrap) == 0) {
    expect_error(ferry_membership_next_view(members, NULL), FERRY_ERROR_PEER_LOST, 0, "told to give up");
    expect(num_asked > 0, "the program was asked");
    contacts[0] = ferry_membership_address(members);
    joining.struct_size = sizeof(joining);
    joining.contacts = contacts;
    joining.num_contacts = 1;
    joining.secret = kSecret;
    joining.interrupted = ask;
    joining.interrupted_user = &num_asked;
    expect_error(ferry_membership_join(&joining, &members), FERRY_ERROR_PEER_LOST, -1, "told to give up");
  }
  expect_ok(ferry_bootstrap_all_gather(bootstrap, &num_asked, sizeof(num_asked), all, 0), "meet");
  ferry_membership_free(members);
  return 0;
}

static void check_bad_input(void) {
  ferry_bootstrap* bootstrap = NULL;
  ferry_membership_options options = {0};
  ferry_join_options joining = {0};
  ferry_next_view_options next = {0};
  ferry_membership_view view = {0};
  ferry_membership* members = NULL;
  ferry_membership_free(NULL);
  expect(strcmp(ferry_membership_address(NULL), "") == 0 && ferry_membership_num_waiting(NULL) == 0, "no membership");
  expect_error(ferry_membership_next_view(NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "membership is null");
  expect_error(ferry_membership_bootstrap(NULL, &bootstrap), FERRY_ERROR_INVALID_ARGUMENT, -1, "membership is null");
  expect_error(ferry_membership_complete_steps(NULL, 1), FERRY_ERROR_INVALID_ARGUMENT, -1, "membership is null");
  expect_error(ferry_membership_create(NULL, NULL, &members), FERRY_ERROR_INVALID_ARGUMENT, -1, "bootstrap is null");
  expect_error(ferry_membership_join(NULL, &members), FERRY_ERROR_INVALID_ARGUMENT, -1, "no contacts");
  joining.struct_size = sizeof(joining);
  joining.num_contacts = 1;
  expect_error(ferry_membership_join(&joining, &members), FERRY_ERROR_INVALID_ARGUMENT, -1, "num_contacts 1");
  joining.num_contacts = 0;
  joining.use_id = 1;
  joining.id = -1;
  expect_error(ferry_membership_join(&joining, &members), FERRY_ERROR_INVALID_ARGUMENT, -1, "id is -1");
  expect_ok(ferry_bootstrap_create_in_process(1, &bootstrap), "ferry_bootstrap_create_in_process");
  options.struct_size = 3;
  expect_error(ferry_membership_create(bootstrap, &options, &members), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "struct_size of the ferry_membership_options is 3");
  ferry_bootstrap_free(bootstrap);
  expect_ok(ferry_bootstrap_create_in_process(1, &bootstrap), "ferry_bootstrap_create_in_process");
  expect_ok(ferry_membership_create(bootstrap, NULL, &members), "options of zeros");
  ferry_bootstrap_free(bootstrap);
  expect_error(ferry_membership_get_view(members, &view), FERRY_ERROR_INVALID_ARGUMENT, -1, "struct_size");
  next.struct_size = 1;
  expect_error(ferry_membership_next_view(members, &next), FERRY_ERROR_INVALID_ARGUMENT, -1, "struct_size");
  expect(view_of(members).epoch == 0, "nothing has changed");
  ferry_membership_free(members);
}

int main(void) {
  check_bad_input();
  expect(run_processes(NUM_RANKS, run_rank) == NUM_RANKS - 1, "a member that is left");
  expect(run_processes(2, run_interrupted_rank) == 2, "a member that is interrupted");
  check_joining();
  printf("membership_test: ok\n");
  return 0;
}

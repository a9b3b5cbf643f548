// Wrong input gives a status, with the same code on every rank, and leaves the group usable; it never crashes.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c/layer.h"

static void check_null(void) {
  ferry_topology topology = {0};
  ferry_bootstrap* bootstrap = NULL;
  ferry_routing* routing = NULL;
  ferry_tensor view;
  int64_t num = 7;

  expect(ferry_status_code(NULL) == FERRY_OK && ferry_status_peer(NULL) == -1, "an ok status");
  expect(strcmp(ferry_status_message(NULL), "") == 0, "the message of an ok status");
  ferry_status_free(NULL);
  ferry_group_free(NULL);
  ferry_bootstrap_free(NULL);
  ferry_routing_free(NULL);
  ferry_buffer_free(NULL);
  ferry_component_list_free(NULL);

  expect_error(ferry_group_create(NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "bootstrap is null");
  expect_error(ferry_group_destroy(NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_group_topology(NULL, &topology), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_route(NULL, NULL, NULL, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_dispatch(NULL, NULL, NULL, NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_combine(NULL, NULL, NULL, NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_latency_receive(NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "group is null");
  expect_error(ferry_bootstrap_create_in_process(2, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_bootstrap_create_in_process(0, &bootstrap), FERRY_ERROR_INVALID_ARGUMENT, -1, "num_ranks");
  expect_error(ferry_bootstrap_create_tcp(NULL, &bootstrap), FERRY_ERROR_INVALID_ARGUMENT, -1, "num_ranks");
  expect_error(ferry_bootstrap_create_callback(NULL, &bootstrap), FERRY_ERROR_INVALID_ARGUMENT, -1, "all_gather");
  expect_error(ferry_bytes_required(NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_latency_bytes_required(NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_dispatch_layout(NULL, NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "dispatch_layout");
  expect_error(ferry_quantize_fp8(NULL, NULL, NULL, 0, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "quantize_fp8");
  expect(bootstrap == NULL && routing == NULL, "failed calls write nothing");

  expect(ferry_group_rank(NULL) == -1 && ferry_group_num_ranks(NULL) == 0, "the rank of no group");
  expect(ferry_buffer_data(NULL) == NULL && ferry_buffer_num_bytes(NULL) == 0, "no buffer");
  expect(ferry_routing_num_recv_rows(NULL) == 0 && ferry_routing_layout(NULL) == 0, "no routing");
  expect(ferry_routing_local_expert_ids(NULL, &num) == NULL && num == 0, "arrays of no routing");
  memset(&view, 0xFF, sizeof(view));
  ferry_routing_slots(NULL, &view);
  expect(view.num_dims == 0 && view.data == NULL, "views of no routing");
}

static void check_struct_sizes(void) {
  struct {
    ferry_memory_shape known;
    int64_t later;  // a member of a newer header
  } newer;
  ferry_memory_shape shape = {0};
  uint64_t num_bytes = 0;
  shape.num_experts = shape.num_topk = 1;
  shape.row_bytes = 16;
  expect_error(ferry_bytes_required(&shape, &num_bytes), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "struct_size of the ferry_memory_shape is 0");
  shape.struct_size = offsetof(ferry_memory_shape, num_logical_experts) - 1;  // smaller than in the first release
  expect_error(ferry_bytes_required(&shape, &num_bytes), FERRY_ERROR_INVALID_ARGUMENT, -1, "struct_size");
  shape.struct_size = UINT64_MAX;
  expect_error(ferry_bytes_required(&shape, &num_bytes), FERRY_ERROR_INVALID_ARGUMENT, -1, "struct_size");
  shape.struct_size = offsetof(ferry_memory_shape, num_logical_experts);
  expect_ok(ferry_bytes_required(&shape, &num_bytes), "the struct of the first release");
  shape.struct_size = sizeof(shape);
  expect_ok(ferry_bytes_required(&shape, &num_bytes), "ferry_bytes_required");

  newer.known = shape;
  newer.known.struct_size = sizeof(newer);
  newer.later = 0;
  expect_ok(ferry_bytes_required(&newer.known, &num_bytes), "a newer struct whose new members are zero");
  newer.later = 1;
  expect_error(ferry_bytes_required(&newer.known, &num_bytes), FERRY_ERROR_UNSUPPORTED, -1, "does not know");
}

static void check_components(void) {
  ferry_component_list* list = NULL;
  const ferry_component* component;
  int64_t i;
  int found = 0;
  expect_ok(ferry_backends(&list), "ferry_backends");
  for (i = 0; i < ferry_component_list_size(list); ++i) {
    component = ferry_component_list_at(list, i);
    expect(component->struct_size == sizeof(*component), "struct_size of a component");
    if (strcmp(component->name, "cpu") == 0 && component->available && *component->reason == 0) found = 1;
  }
  expect(found, "backend cpu");
  expect(ferry_component_list_at(list, i) == NULL && ferry_component_list_at(list, -1) == NULL, "past the list");
  ferry_component_list_free(list);
  expect_ok(ferry_transports(&list), "ferry_transports");
  expect(ferry_component_list_size(list) >= 1, "networks");
  ferry_component_list_free(list);
  expect(ferry_abi_version() == FERRY_ABI_VERSION && strlen(ferry_version()) >= 5, "the version");
  expect(strcmp(ferry_code_name(FERRY_ERROR_TIMEOUT), "kTimeout") == 0, "the name of a code");
  expect(strcmp(ferry_code_name(99), "unknown") == 0, "the name of no code");
}

/// Makes calls that are wrong on rank 1 alone: both ranks refuse with the same code and blame rank 1.
static void check_refusals(ferry_group* group) {
  enum { TOKENS = 2, TOPK = 1, HIDDEN = 8 };
  int64_t topk_idx[TOKENS] = {0, 1};
  float x[TOKENS * HIDDEN] = {0};
  float rows[2 * TOKENS * HIDDEN];
  int32_t owners[2] = {0, 1};
  const int wrong = ferry_group_rank(group) == 1;
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_dispatch_options how = {0};
  ferry_placement placement = {0};
  ferry_routing* routing = NULL;
  layer made;

  choice.struct_size = wrong ? 8 : sizeof(choice);
  choice.topk_idx = matrix(topk_idx, FERRY_INT64, TOKENS, TOPK);
  options.struct_size = sizeof(options);
  options.num_experts = 2;
  expect_error(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, wrong ? -1 : 1,
               wrong ? "struct_size of the ferry_route_input is 8" : "rank 1: route");
  choice.struct_size = sizeof(choice);
  expect_error(ferry_route(group, wrong ? NULL : &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, 1,
               "topk_idx");
  choice.topk_idx.num_dims = wrong ? 7 : 2;
  expect_error(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, 1, "topk_idx");
  choice.topk_idx.num_dims = 2;
  choice.topk_idx.dtype = wrong ? 1000 : FERRY_INT64;
  expect_error(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, 1, "topk_idx");
  choice.topk_idx.dtype = FERRY_INT64;
  options.layout = wrong ? -3 : FERRY_LAYOUT_TOKENS;
  expect_error(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, 1, "layout");
  options.layout = FERRY_LAYOUT_TOKENS;
  options.expert_to_rank = owners;
  options.num_expert_to_rank = wrong ? -1 : 2;
  expect_error(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, wrong ? -1 : 1,
               wrong ? "num_expert_to_rank -1" : "rank 1: route");
  options.num_expert_to_rank = 2;
  placement.struct_size = sizeof(placement);
  placement.num_physical_experts = wrong ? 3 : 0;
  options.placement = &placement;
  expect_code(ferry_route(group, &choice, &options, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, "a placement");
  // Struct size of a program compiled before placements existed: memory behind its struct is not read.
  options.struct_size = offsetof(ferry_route_options, placement);
  expect(routing == NULL, "no routing from refused calls");
  expect_ok(ferry_route(group, &choice, &options, NULL, &routing), "ferry_route after refused ones");

  send.struct_size = sizeof(send);
  send.x = matrix(x, FERRY_FLOAT32, TOKENS, HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows, FERRY_FLOAT32, ferry_routing_num_recv_rows(routing), HIDDEN);
  expect_error(ferry_dispatch(group, wrong ? NULL : routing, &send, &receive, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT,
               1, "the Routing is empty");
  receive.x.shape[0] += wrong;
  expect_error(ferry_dispatch(group, routing, &send, &receive, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, 1, "output");
  receive.x.shape[0] -= wrong;
  send.x.num_dims = wrong ? -1 : 2;
  expect_error(ferry_dispatch(group, routing, &send, &receive, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, 1, "input x");
  send.x.num_dims = 2;
  how.struct_size = sizeof(how);
  how.quantize = wrong ? 77 : FERRY_QUANTIZE_NONE;
  expect_error(ferry_dispatch(group, routing, &send, &receive, &how, NULL), FERRY_ERROR_INVALID_ARGUMENT, 1,
               "quantize");
  how.quantize = FERRY_QUANTIZE_NONE;
  how.num_sms = wrong ? -1 : 0;
  expect_error(ferry_dispatch(group, routing, &send, &receive, &how, NULL), FERRY_ERROR_INVALID_ARGUMENT, 1,
               "num_sms is -1");
  expect_error(ferry_dispatch(group, routing, &send, &receive, NULL, wrong ? &how : NULL), FERRY_ERROR_INVALID_ARGUMENT,
               1, "stream");
  expect_ok(ferry_dispatch(group, routing, &send, &receive, NULL, NULL), "ferry_dispatch after refused ones");
  ferry_routing_free(routing);

  made = make_layer(group);
  run_experts_layout(&made, 0);
  free_layer(&made);
}

static void check_destroyed(ferry_group* group) {
  ferry_buffer* buffer = NULL;
  ferry_memory_usage usage = {0};
  ferry_routing* routing = NULL;
  expect_ok(ferry_group_destroy(group), "ferry_group_destroy");
  expect_error(ferry_group_destroy(group), FERRY_ERROR_INVALID_ARGUMENT, -1, "destroyed");
  expect_error(ferry_group_allocate(group, 1, &buffer), FERRY_ERROR_INVALID_ARGUMENT, -1, "destroyed");
  expect_error(ferry_route(group, NULL, NULL, NULL, &routing), FERRY_ERROR_INVALID_ARGUMENT, -1, "destroyed");
  expect_error(ferry_dispatch(group, NULL, NULL, NULL, NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "destroyed");
  expect_error(ferry_group_wait(group, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "destroyed");
  usage.struct_size = sizeof(usage);
  expect_ok(ferry_group_memory_usage(group, &usage), "ferry_group_memory_usage");
  expect(usage.total_bytes == 0 && ferry_group_num_ranks(group) == 2, "a destroyed group holds nothing");
}

/// Arguments that cannot be read on rank 1: the other rank need not wait for it.
static void check_refused_creation(ferry_bootstrap* bootstrap, ferry_group_options options) {
  const int wrong = ferry_bootstrap_rank(bootstrap) == 1;
  ferry_one_sided_options heap = {0};
  ferry_one_sided* one_sided = NULL;
  ferry_membership_options membership = {0};
  ferry_membership* members = NULL;
  ferry_group* group = NULL;
  expect_error(ferry_group_create(bootstrap, &options, wrong ? NULL : &group), FERRY_ERROR_INVALID_ARGUMENT,
               wrong ? -1 : 1, wrong ? "group is null" : "cannot be read");
  options.struct_size = wrong ? 3 : sizeof(options);
  expect_error(ferry_group_create(bootstrap, &options, &group), FERRY_ERROR_INVALID_ARGUMENT, wrong ? -1 : 1,
               wrong ? "struct_size of the ferry_group_options is 3" : "cannot be read");
  heap.struct_size = wrong ? 3 : sizeof(heap);
  heap.backend = "cpu";
  expect_error(ferry_one_sided_create(bootstrap, &heap, &one_sided), FERRY_ERROR_INVALID_ARGUMENT, wrong ? -1 : 1,
               wrong ? "struct_size of the ferry_one_sided_options is 3" : "cannot be read");
  heap.struct_size = sizeof(heap);
  heap.timeout_ns = -1;
  expect_error(ferry_one_sided_create(bootstrap, &heap, &one_sided), FERRY_ERROR_INVALID_ARGUMENT, -1,
               "OneSided::create: timeout_ns is -1");
  membership.struct_size = wrong ? 3 : sizeof(membership);
  expect_error(ferry_membership_create(bootstrap, &membership, &members), FERRY_ERROR_INVALID_ARGUMENT, wrong ? -1 : 1,
               wrong ? "struct_size of the ferry_membership_options is 3" : "timeout_ns is 0");
}

static void* run_rank(void* bootstrap) {
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  ferry_topology topology = {0};
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.timeout_ns = 60000000000;
  check_refused_creation(bootstrap, options);
  expect_ok(ferry_group_create(bootstrap, &options, &group), "ferry_group_create");
  expect_error(ferry_group_topology(group, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "to fill is null");
  expect_error(ferry_group_topology(group, &topology), FERRY_ERROR_INVALID_ARGUMENT, -1, "struct_size");
  expect_error(ferry_group_allocate(group, UINT64_MAX, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  check_refusals(group);
  check_destroyed(group);
  ferry_group_free(group);
  ferry_bootstrap_free(bootstrap);
  return NULL;
}

static int32_t refuse(void* user, const void* mine, uint64_t num_bytes, void* all, int64_t timeout_ns) {
  (void)mine, (void)num_bytes, (void)all, (void)timeout_ns;
  return *(int32_t*)user;
}

/// An error returned by a callback becomes the status of the calls that needed it, and of all later ones.
static void check_failing_callback(int32_t returned, int32_t code) {
  ferry_callback_options options = {0};
  ferry_bootstrap* bootstrap = NULL;
  ferry_group* group = NULL;
  options.struct_size = sizeof(options);
  options.all_gather = refuse;
  options.user = &returned;
  options.num_ranks = 2;
  expect_ok(ferry_bootstrap_create_callback(&options, &bootstrap), "ferry_bootstrap_create_callback");
  expect_error(ferry_group_create(bootstrap, NULL, &group), code, -1, "callback returned");
  returned = FERRY_OK;
  expect_error(ferry_group_create(bootstrap, NULL, &group), code, -1, "callback returned");
  ferry_bootstrap_free(bootstrap);
}

int main(void) {
  ferry_bootstrap* bootstraps[2];
  pthread_t threads[2];
  int rank;
  check_null();
  check_struct_sizes();
  check_components();
  check_failing_callback(FERRY_ERROR_TIMEOUT, FERRY_ERROR_TIMEOUT);
  check_failing_callback(-12, FERRY_ERROR_TRANSPORT);
  expect_ok(ferry_bootstrap_create_in_process(2, bootstraps), "ferry_bootstrap_create_in_process");
  for (rank = 0; rank < 2; ++rank) {
    expect(pthread_create(&threads[rank], NULL, run_rank, bootstraps[rank]) == 0, "pthread_create");
  }
  for (rank = 0; rank < 2; ++rank) expect(pthread_join(threads[rank], NULL) == 0, "pthread_join");
  printf("bad_input_test: ok\n");
  return 0;
}

/* A program of an outside project in C99: one rank sends two tokens to its own experts and back. */
#include <stdio.h>

#include "ferry/ferry.h"

enum { TOKENS = 2, HIDDEN = 4 };

static ferry_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  ferry_tensor view = {0};
  view.data = data;
  view.dtype = dtype;
  view.num_dims = 2;
  view.shape[0] = rows;
  view.shape[1] = columns;
  return view;
}

static int succeeded(ferry_status* status) {
  if (status == NULL) return 1;
  fprintf(stderr, "%s: %s\n", ferry_code_name(ferry_status_code(status)), ferry_status_message(status));
  ferry_status_free(status);
  return 0;
}

static int run(ferry_group* group) {
  int64_t topk_idx[TOKENS] = {1, 0};
  float x[TOKENS * HIDDEN] = {1, 2, 3, 4, 5, 6, 7, 8};
  float rows[TOKENS * HIDDEN];
  float sums[TOKENS * HIDDEN];
  ferry_route_input choice = {sizeof(choice), matrix(topk_idx, FERRY_INT64, TOKENS, 1), {0}};
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_combine_input results = {0};
  ferry_combine_output out = {0};
  ferry_routing* routing = NULL;
  int good;
  int i;
  options.struct_size = sizeof(options);
  options.num_experts = TOKENS;
  if (!succeeded(ferry_route(group, &choice, &options, NULL, &routing))) return 0;
  send.struct_size = sizeof(send);
  send.x = matrix(x, FERRY_FLOAT32, TOKENS, HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(rows, FERRY_FLOAT32, ferry_routing_num_recv_rows(routing), HIDDEN);
  results.struct_size = sizeof(results);
  results.x = receive.x;
  out.struct_size = sizeof(out);
  out.x = matrix(sums, FERRY_FLOAT32, TOKENS, HIDDEN);
  good = succeeded(ferry_dispatch(group, routing, &send, &receive, NULL, NULL)) &&
         succeeded(ferry_combine(group, routing, &results, &out, NULL, NULL));
  for (i = 0; i < TOKENS * HIDDEN; ++i) good = good && sums[i] == x[i];
  ferry_routing_free(routing);
  return good;
}

int main(void) {
  ferry_bootstrap* bootstrap = NULL;
  ferry_group_options options = {0};
  ferry_group* group = NULL;
  int good;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  if (!succeeded(ferry_bootstrap_create_in_process(1, &bootstrap))) return 1;
  good = succeeded(ferry_group_create(bootstrap, &options, &group)) && run(group);
  ferry_group_free(group);
  ferry_bootstrap_free(bootstrap);
  if (!good) return 1;
  printf("ok %s\n", ferry_version());
  return 0;
}

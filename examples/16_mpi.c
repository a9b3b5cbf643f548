// Ranks of MPI as ranks of a group: MPI's all-gather takes the place of Ferry's bootstrap.
//
//   mpirun -n 4 ./16_mpi
//
// Each rank sends one row to the expert of the next rank, which doubles it, and gets it back.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "ferry/ferry.h"

enum { HIDDEN = 16 };

// MPI waits without a deadline; a rank that dies ends the whole job.
static int32_t gather(void* user, const void* mine, uint64_t num_bytes, void* all, int64_t timeout_ns) {
  (void)timeout_ns;
  if (MPI_Allgather(mine, (int)num_bytes, MPI_BYTE, all, (int)num_bytes, MPI_BYTE, *(MPI_Comm*)user) != MPI_SUCCESS) {
    return FERRY_ERROR_TRANSPORT;
  }
  return FERRY_OK;
}

static void require(ferry_status* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s: %s\n", ferry_code_name(ferry_status_code(status)), ferry_status_message(status));
  ferry_status_free(status);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static ferry_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  ferry_tensor view = {0};
  view.data = data;
  view.dtype = dtype;
  view.num_dims = 2;
  view.shape[0] = rows;
  view.shape[1] = columns;
  return view;
}

static ferry_group* make_group(MPI_Comm* communicator) {
  ferry_callback_options callback = {0};
  ferry_group_options options = {0};
  ferry_bootstrap* bootstrap = NULL;
  ferry_group* group = NULL;
  int rank;
  int num_ranks;
  MPI_Comm_rank(*communicator, &rank);
  MPI_Comm_size(*communicator, &num_ranks);
  callback.struct_size = sizeof(callback);
  callback.all_gather = gather;
  callback.user = communicator;
  callback.rank = rank;
  callback.num_ranks = num_ranks;
  require(ferry_bootstrap_create_callback(&callback, &bootstrap));
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  require(ferry_group_create(bootstrap, &options, &group));
  ferry_bootstrap_free(bootstrap);  // the group no longer needs it
  return group;
}

int main(int argc, char** argv) {
  MPI_Comm communicator = MPI_COMM_WORLD;
  ferry_route_input choice = {0};
  ferry_route_options options = {0};
  ferry_dispatch_input send = {0};
  ferry_dispatch_output receive = {0};
  ferry_combine_input results = {0};
  ferry_combine_output sums = {0};
  ferry_group* group;
  ferry_routing* routing = NULL;
  int64_t topk_idx;
  float x[HIDDEN];
  float row[HIDDEN];
  float out[HIDDEN] = {0};
  int32_t rank;
  int32_t num_ranks;
  int wrong = 0;
  int i;

  MPI_Init(&argc, &argv);
  group = make_group(&communicator);
  rank = ferry_group_rank(group);
  num_ranks = ferry_group_num_ranks(group);

  topk_idx = (rank + 1) % num_ranks;  // one expert per rank
  choice.struct_size = sizeof(choice);
  choice.topk_idx = matrix(&topk_idx, FERRY_INT64, 1, 1);
  options.struct_size = sizeof(options);
  options.num_experts = num_ranks;
  require(ferry_route(group, &choice, &options, NULL, &routing));

  for (i = 0; i < HIDDEN; ++i) x[i] = (float)(rank * HIDDEN + i);
  send.struct_size = sizeof(send);
  send.x = matrix(x, FERRY_FLOAT32, 1, HIDDEN);
  receive.struct_size = sizeof(receive);
  receive.x = matrix(row, FERRY_FLOAT32, ferry_routing_num_recv_rows(routing), HIDDEN);
  require(ferry_dispatch(group, routing, &send, &receive, NULL, NULL));

  for (i = 0; i < HIDDEN; ++i) row[i] *= 2;

  results.struct_size = sizeof(results);
  results.x = receive.x;
  sums.struct_size = sizeof(sums);
  sums.x = matrix(out, FERRY_FLOAT32, 1, HIDDEN);
  require(ferry_combine(group, routing, &results, &sums, NULL, NULL));
  for (i = 0; i < HIDDEN; ++i) wrong += out[i] != 2 * x[i];

  ferry_routing_free(routing);
  require(ferry_group_destroy(group));
  ferry_group_free(group);
  printf("rank %d of %d: %s\n", (int)rank, (int)num_ranks, wrong == 0 ? "right" : "wrong");
  MPI_Finalize();
  return wrong == 0 ? 0 : 1;
}

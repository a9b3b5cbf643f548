// One-sided calls from C, over ranks that are processes: a ring, counters, teams, wrong input.
#include <stdio.h>
#include <string.h>

#include "c/check.h"

enum { NUM_RANKS = 3, NUM_VALUES = 100 };

static ferry_one_sided* make(ferry_bootstrap* bootstrap) {
  ferry_one_sided_options options = {0};
  ferry_one_sided* shm = NULL;
  options.struct_size = sizeof(options);
  options.backend = "cpu";
  options.heap_bytes = 1 << 20;
  options.timeout_ns = 60000000000;
  expect_ok(ferry_one_sided_create(bootstrap, &options, &shm), "ferry_one_sided_create");
  expect(strcmp(ferry_one_sided_backend(shm), "cpu") == 0, "the backend");
  return shm;
}

/// Each rank's row goes around the ring once, and every rank adds one to it.
static void check_ring(ferry_one_sided* shm, int32_t rank, int64_t* row, uint64_t* words) {
  int64_t mine[NUM_VALUES];
  int64_t back[NUM_VALUES];
  int32_t next = (rank + 1) % NUM_RANKS;
  int32_t holds = 7;
  uint64_t step;
  int i;
  for (i = 0; i < NUM_VALUES; ++i) mine[i] = 1000 * rank + i;
  for (step = 1; step <= NUM_RANKS; ++step) {
    expect_ok(ferry_put_signal(shm, next, row, mine, sizeof(mine), &words[0], 1, FERRY_SIGNAL_ADD, NULL), "put_signal");
    expect_ok(ferry_wait_until(shm, &words[0], FERRY_GREATER_EQUAL, step, 0, NULL), "ferry_wait_until");
    for (i = 0; i < NUM_VALUES; ++i) mine[i] = row[i] + 1;
    expect_ok(ferry_barrier(shm, NULL, NULL), "ferry_barrier");
  }
  for (i = 0; i < NUM_VALUES; ++i) expect(mine[i] == 1000 * rank + i + NUM_RANKS, "the row after one round");
  expect_ok(ferry_test_word(shm, &words[0], FERRY_EQUAL, NUM_RANKS, &holds), "ferry_test_word");
  expect(holds == 1, "the word of the ring");

  expect_ok(ferry_get(shm, next, back, row, sizeof(back), NULL), "ferry_get");
  expect(back[0] == 1000 * next + NUM_RANKS - 1, "the row in the memory of the next rank");
  expect_ok(ferry_barrier(shm, NULL, NULL), "ferry_barrier");
  mine[0] = -rank;
  expect_ok(ferry_put_nbi(shm, next, row, mine, sizeof(mine[0]), NULL), "ferry_put_nbi");
  expect_ok(ferry_fence(shm, next, NULL), "ferry_fence");
  expect_ok(ferry_signal(shm, next, &words[0], 77, FERRY_SIGNAL_SET, NULL), "ferry_signal");
  expect_ok(ferry_quiet(shm, NULL), "ferry_quiet");
  expect_ok(ferry_wait_until(shm, &words[0], FERRY_EQUAL, 77, 0, NULL), "ferry_wait_until");
  expect(row[0] == -((rank + NUM_RANKS - 1) % NUM_RANKS), "the put that a fence orders before a signal");
}

static void check_counters(ferry_one_sided* shm, uint64_t* words) {
  uint64_t before = 99;
  int i;
  for (i = 0; i < NUM_VALUES; ++i) expect_ok(ferry_fetch_add(shm, 0, &words[1], 2, &before, NULL), "ferry_fetch_add");
  expect(before < 2 * NUM_RANKS * NUM_VALUES, "the value that fetch_add fetched");
  expect_ok(ferry_barrier(shm, NULL, NULL), "ferry_barrier");
  expect_ok(ferry_fetch_add_on_host(shm, 0, &words[1], 0, &before), "ferry_fetch_add_on_host");
  expect(before == 2 * NUM_RANKS * NUM_VALUES, "the sum of all ranks");
  expect_ok(ferry_barrier(shm, NULL, NULL), "ferry_barrier");
  expect_ok(ferry_compare_swap(shm, 0, &words[1], 5, 6, &before, NULL), "ferry_compare_swap");
  expect(before == 2 * NUM_RANKS * NUM_VALUES, "the value that an unequal compare_swap fetched");
}

/// Words that only this rank uses, at the next rank.
static void check_words(ferry_one_sided* shm, int32_t rank, uint64_t* wide, uint32_t* narrow) {
  int32_t next = (rank + 1) % NUM_RANKS;
  uint64_t before = 99;
  uint32_t half[2] = {99, 77};
  expect_ok(ferry_fetch(shm, next, FERRY_FETCH_SWAP, wide, 0xF00000000F, &before, NULL), "swap");
  expect(before == 0, "the value that a swap fetched");
  expect_ok(ferry_fetch_on_host(shm, next, FERRY_FETCH_AND, wide, 0x9000000FF9, &before), "fetch_and");
  expect(before == 0xF00000000F, "the value that fetch_and fetched");
  expect_ok(ferry_fetch(shm, next, FERRY_FETCH_OR, wide, 6, &before, NULL), "fetch_or");
  expect(before == 0x9000000009, "the value that fetch_or fetched");
  expect_ok(ferry_fetch_on_host(shm, next, FERRY_FETCH_XOR, wide, 0x9000000000, &before), "fetch_xor");
  expect(before == 0x900000000F, "the value that fetch_xor fetched");
  expect_ok(ferry_fetch(shm, next, FERRY_FETCH_ADD, wide, 1, &before, NULL), "fetch_add");
  expect(before == 15, "the value that fetch_add fetched");

  expect_ok(ferry_signal32(shm, next, narrow, 0xFFFFFFFE, FERRY_SIGNAL_SET, NULL), "ferry_signal32");
  expect_ok(ferry_quiet_rank(shm, next, NULL), "ferry_quiet_rank");
  expect_ok(ferry_fetch32(shm, next, FERRY_FETCH_ADD, narrow, 5, half, NULL), "fetch_add of 4 bytes");
  expect(half[0] == 0xFFFFFFFE && half[1] == 77, "the value that it fetched");
  expect_ok(ferry_fetch32_on_host(shm, next, FERRY_FETCH_SWAP, narrow, 8, half), "swap of 4 bytes");
  expect(half[0] == 3, "the value that it fetched, modulo 2^32");
  expect_ok(ferry_compare_swap32(shm, next, narrow, 3, 4, half, NULL), "ferry_compare_swap32");
  expect(half[0] == 8, "the value of an unequal one");
  expect_ok(ferry_compare_swap32_on_host(shm, next, narrow, 8, 4, half), "ferry_compare_swap32_on_host");
  expect(half[0] == 8 && half[1] == 77, "the value of an equal one");
  expect_ok(ferry_barrier(shm, NULL, NULL), "ferry_barrier");
  expect(*wide == 16 && narrow[0] == 4 && narrow[-1] == 0, "the words afterwards");
}

static void check_teams(ferry_one_sided* shm, int32_t rank) {
  ferry_team* world = NULL;
  ferry_team* part = NULL;
  expect_ok(ferry_team_get(shm, FERRY_TEAM_WORLD, &world), "ferry_team_get");
  expect(ferry_team_num_ranks(world) == NUM_RANKS && ferry_team_rank(world) == rank, "the team of all ranks");
  // A team of ranks 0 and 2 in reverse order; rank 1 is in no team.
  expect_ok(ferry_team_split(shm, world, rank == 1 ? -1 : 4, -rank, &part), "ferry_team_split");
  if (rank == 1) {
    expect(part == NULL, "no team");
  } else {
    expect(ferry_team_num_ranks(part) == 2 && ferry_team_rank(part) == (rank == 0), "a part");
    expect(ferry_team_world_rank(part, 0) == 2 && ferry_team_world_rank(part, 5) == -1, "ranks of the part");
    expect_ok(ferry_barrier(shm, part, NULL), "ferry_barrier of a part");
  }
  ferry_team_free(part);
  ferry_team_free(world);
  expect_error(ferry_team_get(shm, 9, &world), FERRY_ERROR_INVALID_ARGUMENT, -1, "is no team");
}

static void check_bad_input(ferry_one_sided* shm, uint64_t* words) {
  uint64_t outside = 0;
  expect_error(ferry_put(NULL, 0, words, &outside, 8, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_quiet(NULL, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_code(ferry_put(shm, 0, &outside, words, 8, NULL), FERRY_ERROR_INVALID_ARGUMENT, "outside");
  expect_code(ferry_put(shm, NUM_RANKS, words, &outside, 8, NULL), FERRY_ERROR_INVALID_ARGUMENT, "no such rank");
  expect_code(ferry_signal(shm, 0, words, 1, 9, NULL), FERRY_ERROR_INVALID_ARGUMENT, "no such op");
  expect_code(ferry_wait_until(shm, words, -1, 1, 0, NULL), FERRY_ERROR_INVALID_ARGUMENT, "no such comparison");
  expect_code(ferry_wait_until(shm, words, FERRY_EQUAL, 1234, 1, NULL), FERRY_ERROR_TIMEOUT, "a deadline");
  expect_error(ferry_fetch_add_on_host(shm, 0, words, 1, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_code(ferry_quiet_rank(shm, NUM_RANKS, NULL), FERRY_ERROR_INVALID_ARGUMENT, "no such rank");
  expect_code(ferry_signal32(shm, 0, (uint32_t*)((char*)words + 2), 1, FERRY_SIGNAL_SET, NULL),
              FERRY_ERROR_INVALID_ARGUMENT, "misaligned");
  expect_code(ferry_fetch(shm, 0, FERRY_FETCH_OR, &outside, 1, &outside, NULL), FERRY_ERROR_INVALID_ARGUMENT,
              "outside");
  expect_error(ferry_fetch(shm, 0, 5, words, 1, &outside, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "no operation");
  expect_error(ferry_fetch32_on_host(shm, 0, -1, (uint32_t*)words, 1, (uint32_t*)&outside),
               FERRY_ERROR_INVALID_ARGUMENT, -1, "no operation");
  expect_error(ferry_fetch_on_host(shm, 0, FERRY_FETCH_ADD, words, 1, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect_error(ferry_test_word(shm, words, FERRY_EQUAL, 1, NULL), FERRY_ERROR_INVALID_ARGUMENT, -1, "null");
  expect(ferry_one_sided_peer_pointer(shm, 0, &outside) == NULL, "an address outside");
  expect(ferry_one_sided_peer_pointer(shm, 0, words) != NULL, "an address inside");
}

static int run_rank(ferry_bootstrap* bootstrap) {
  ferry_topology topology = {0};
  ferry_one_sided* shm = make(bootstrap);
  void* row = NULL;
  void* words = NULL;
  int32_t rank = ferry_bootstrap_rank(bootstrap);
  topology.struct_size = sizeof(topology);
  expect_ok(ferry_one_sided_topology(shm, &topology), "ferry_one_sided_topology");
  expect(topology.rank == rank && topology.num_ranks == NUM_RANKS, "the topology");
  expect_ok(ferry_one_sided_allocate(shm, NUM_VALUES * sizeof(int64_t), &row), "ferry_one_sided_allocate");
  expect_ok(ferry_one_sided_allocate(shm, 5 * sizeof(uint64_t), &words), "ferry_one_sided_allocate");
  check_ring(shm, rank, row, words);
  check_counters(shm, words);
  check_words(shm, rank, (uint64_t*)words + 2, (uint32_t*)words + 7);
  check_teams(shm, rank);
  check_bad_input(shm, words);
  expect_ok(ferry_one_sided_release(shm, words), "ferry_one_sided_release");
  expect_ok(ferry_one_sided_poll(shm), "ferry_one_sided_poll");
  expect_ok(ferry_one_sided_destroy(shm), "ferry_one_sided_destroy");
  expect_code(ferry_quiet(shm, NULL), FERRY_ERROR_INVALID_ARGUMENT, "use after destroy");
  ferry_one_sided_free(shm);
  return 0;
}

int main(void) {
  expect(run_processes(NUM_RANKS, run_rank) == NUM_RANKS, "a rank");
  printf("one_sided_test: ok\n");
  return 0;
}

#include "c/check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

void expect(int condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

void expect_ok(ferry_status* status, const char* what) {
  if (status == NULL) return;
  fprintf(stderr, "failed: %s: %s: %s\n", what, ferry_code_name(ferry_status_code(status)),
          ferry_status_message(status));
  ferry_status_free(status);
  exit(1);
}

void expect_error(ferry_status* status, int32_t code, int32_t peer, const char* text) {
  const char* message = ferry_status_message(status);
  if (ferry_status_code(status) != code || ferry_status_peer(status) != peer || strstr(message, text) == NULL) {
    fprintf(stderr, "failed: got %s, peer %d, \"%s\"; expected %s, peer %d, \"%s\"\n",
            ferry_code_name(ferry_status_code(status)), (int)ferry_status_peer(status), message, ferry_code_name(code),
            (int)peer, text);
    exit(1);
  }
  ferry_status_free(status);
}

void expect_code(ferry_status* status, int32_t code, const char* what) {
  expect(ferry_status_code(status) == code, what);
  ferry_status_free(status);
}

ferry_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  ferry_tensor view = {0};
  view.data = data;
  view.dtype = dtype;
  view.num_dims = 2;
  view.shape[0] = rows;
  view.shape[1] = columns;
  return view;
}

void* memory(size_t num_bytes) {
  void* block = calloc(num_bytes + 1, 1);
  expect(block != NULL, "malloc");
  return block;
}

/// Opens a listening socket on a free port of this machine.
static int listen_anywhere(int32_t num_ranks, int32_t* port) {
  struct sockaddr_in address;
  socklen_t length = sizeof(address);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  memset(&address, 0, sizeof(address));
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  expect(bind(fd, (struct sockaddr*)&address, sizeof(address)) == 0, "bind");
  expect(listen(fd, num_ranks) == 0, "listen");
  expect(getsockname(fd, (struct sockaddr*)&address, &length) == 0, "getsockname");
  *port = ntohs(address.sin_port);
  return fd;
}

static int run_rank(int32_t rank, int32_t num_ranks, int32_t port, int fd, int (*run)(ferry_bootstrap*)) {
  ferry_tcp_options options = {0};
  ferry_bootstrap* bootstrap = NULL;
  int result;
  options.struct_size = sizeof(options);
  options.rank = rank;
  options.num_ranks = num_ranks;
  options.port = port;
  options.secret = "of this test";
  if (rank == 0) {
    options.listen_fd = fd;
  } else {
    close(fd);
  }
  expect_ok(ferry_bootstrap_create_tcp(&options, &bootstrap), "ferry_bootstrap_create_tcp");
  result = run(bootstrap);
  ferry_bootstrap_free(bootstrap);
  return result;
}

int run_processes(int32_t num_ranks, int (*run)(ferry_bootstrap* bootstrap)) {
  int32_t port;
  int32_t rank;
  int status;
  int num_good = 0;
  int fd = listen_anywhere(num_ranks, &port);
  for (rank = 0; rank < num_ranks; ++rank) {
    pid_t child = fork();
    expect(child >= 0, "fork");
    if (child == 0) exit(run_rank(rank, num_ranks, port, fd, run));
  }
  close(fd);
  for (rank = 0; rank < num_ranks; ++rank) {
    expect(wait(&status) > 0, "wait");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) ++num_good;
  }
  return num_good;
}

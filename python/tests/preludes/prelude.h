/* Names that snippets of the documentation in C use and do not declare: of MPI, which need not be there. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ferry/ferry.h"

typedef struct mpi_communicator* MPI_Comm;
enum { MPI_BYTE = 1, MPI_SUCCESS = 0 };
int MPI_Allgather(const void* mine, int num_sent, int sent_type, void* all, int num_received, int received_type,
                  MPI_Comm communicator);

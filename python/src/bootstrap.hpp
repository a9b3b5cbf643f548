#ifndef FERRY_PYTHON_BOOTSTRAP_HPP
#define FERRY_PYTHON_BOOTSTRAP_HPP

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "ferry/bootstrap.hpp"

namespace ferry::python {

/// An all-gather that is a Python function, bytes -> list of bytes: torch.distributed, mpi4py, … `local_address` as
/// Bootstrap::local_address.
std::shared_ptr<Bootstrap> callback_bootstrap(int rank, int num_ranks, nanobind::callable gather,
                                              std::string local_address);

/// TCP, set up from the variables of torchrun, mpirun or srun.
std::shared_ptr<Bootstrap> environment_bootstrap(std::int64_t timeout_ns);

}  // namespace ferry::python

#endif  // FERRY_PYTHON_BOOTSTRAP_HPP

#ifndef FERRY_MEMORY_HPP
#define FERRY_MEMORY_HPP

/// Symmetric memory that a group holds, and how much a batch will need.

#include <cstddef>
#include <cstdint>
#include <string>

#include "ferry/export.hpp"
#include "ferry/routing.hpp"
#include "ferry/status.hpp"

namespace ferry {

/// Symmetric memory that a group holds on this rank, in bytes.
struct MemoryUsage {
  std::size_t control_bytes = 0;  ///< flags, mailboxes, tickets
  std::size_t network_bytes = 0;  ///< rings to other nodes and call headers; 0 with one node
  /// Copies of rows that peers cannot reach in place, route's tables, and on CUDA GroupOptions::latency_bytes. On CUDA,
  /// copies that do not fit in the staging of earlier calls of the kind take an eighth more than they need, as long as
  /// there is memory.
  std::size_t staging_bytes = 0;
  std::size_t allocated_bytes = 0;  ///< by `allocate`, rounded up to pages
  std::size_t total_bytes() const { return control_bytes + network_bytes + staging_bytes + allocated_bytes; }
};

/// Shapes of one rank's use of a group, for `bytes_required`. Each number may be exact for one batch, or the largest
/// over all batches; a group ignores the numbers that it does not need.
struct MemoryShape {
  std::string backend = "cpu";  ///< a name from `ferry::backends()`
  int num_ranks = 1;
  int ranks_per_node = 0;            ///< 0: all ranks on one host
  std::int64_t num_experts = 0;      ///< E; with a Placement, P
  std::int64_t num_tokens = 0;       ///< T of this rank
  int num_topk = 0;                  ///< K
  std::int64_t num_recv_rows = 0;    ///< `Routing::num_recv_rows()`
  std::int64_t num_used_rows = -1;   ///< `Routing::num_used_rows()`; -1: all of num_recv_rows
  std::int64_t row_bytes = 0;        ///< bytes of one payload row
  std::int64_t scale_row_bytes = 0;  ///< bytes of one row of scales, 0 if none
  /// Bytes of one row after quantising by dispatch (DispatchOptions::quantize), that is H; 0: dispatch does not
  /// quantise. Dispatch's input and combine's rows then have row_bytes, and scale_row_bytes is that of dispatch's
  /// output.
  std::int64_t quantized_row_bytes = 0;
  /// H of combine's rows if they travel as WireFormat::kFp8; 0: they travel as they are. One node.
  std::int64_t combine_fp8_hidden = 0;
  Layout layout = Layout::kTokens;
  bool weights = false;  ///< route is given weights, and they are sent (with ids for kTokens) and summed back
  /// true: x of dispatch, dispatch's output and combine's input are in memory from `allocate`.
  /// false: other memory, which ranks of a CPU group in other processes reach through staging; the result assumes that
  /// there are such ranks and that rows travel to and from them.
  bool symmetric = true;

  /// LatencyDispatchOptions::max_tokens: the calls are those of latency mode. `weights` then means that
  /// latency_dispatch is given weights, although none are sent or summed back. 0: route, dispatch and combine.
  std::int64_t max_tokens = 0;

  bool verify = false;  ///< GroupOptions::verify

  // Several nodes:
  std::int64_t num_node_tokens = 0;       ///< this rank's tokens that go to its own node; at most T
  std::int64_t num_forwarded_tokens = 0;  ///< tokens of the ranks with its index in other nodes that go to its node
  std::int64_t num_node_entries = 0;      ///< (token, k) of both with an expert in its node; at most K times both

  // Backend "cuda":
  std::int64_t num_local_experts = -1;  ///< experts of this rank; -1: E / R, rounded up
  int num_routings = 1;                 ///< Routings alive at the same time
  std::size_t latency_bytes = 0;        ///< GroupOptions::latency_bytes
  /// Scales, ids and weights that dispatch writes and combine reads are in memory from `allocate` (not counted).
  bool symmetric_tables = false;
  std::int64_t num_logical_experts = 0;  ///< E if there is a Placement, for its tables on the GPU; 0: none
  bool placement_on_device = false;      ///< the Placement's physical_to_logical_view is given
};

/// Symmetric memory that one rank of a group holds after it has routed (at least twice), dispatched and combined such a
/// batch: control pages, the network's, staging, and with `symmetric` three payload buffers (x of dispatch, its output,
/// combine's input), each rounded up to pages. Equal to `Group::memory_usage().total_bytes()` at that point; on a CUDA
/// group provided that the stream has been waited for, one placement of experts is used and all batches are alike (an
/// arena of that size is also enough for smaller batches, and for the growth of their staging); on a CUDA group of
/// several nodes with rings in host memory it is an upper bound, for any routing by hosts or latency mode. On a CPU
/// group calls of latency mode hold as much as those three with layout kSlab and without `weights`; on a CUDA group
/// they hold GroupOptions::latency_bytes, over several nodes memory of the host besides, and all calls hold the tables
/// of their Routings: all of it is counted.
/// @errors kInvalidArgument: a negative or absurd number, or numbers that contradict each other
///         kUnsupported: this build has no such backend, or it has no groups of that many nodes
FERRY_API Result<std::size_t> bytes_required(const MemoryShape& shape);

}  // namespace ferry

#endif  // FERRY_MEMORY_HPP

#ifndef FERRY_PYTHON_DEEP_EP_HANDLE_TABLES_HPP
#define FERRY_PYTHON_DEEP_EP_HANDLE_TABLES_HPP

/// The tables of a handle of the second generation, one allocation for each dtype.

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "calls.hpp"
#include "ferry/arrival_tables.hpp"

namespace ferry::python::deep_ep {

struct HandleShape {
  std::int64_t num_rows = 0;  ///< of the dispatch's outputs, or as many as are likely
  std::int64_t num_topk = 1;
  std::int64_t num_local = 0;   ///< experts here
  std::int64_t max_tokens = 1;  ///< of a rank
  std::int64_t alignment = 1;
  bool expands = false;
};

/// Made while route waits for its counts, or before a route that does not wait.
class HandleTables {
 public:
  /// sent_ids: to be copied; absent: there is no copy. makes_source: there is a table of sources, too.
  HandleTables(const Calls& calls, const HandleShape& shape, const ConstTensorView& sent_ids, bool makes_source);

  /// num_rows: the number of rows, once it is known.
  /// @throws nanobind::python_error
  void make(std::optional<std::int64_t> num_rows = {});
  bool is_made() const { return is_made_; }

  TensorView source() const { return read_tensor(made_[kSource], calls_.place()); }

  /// After the dispatch. in: without the ids that were sent.
  void fill(Arrivals in, Stream stream);

  const nanobind::object& origin() const { return made_[kOrigin]; }
  const nanobind::object& rows_through_rank() const { return made_[kRowsThroughRank]; }
  const nanobind::object& expert_ends() const { return made_[kExpertEnds]; }
  /// Tables that were not wanted are not valid.
  const nanobind::object& ids() const { return made_[kIds]; }
  const nanobind::object& source_table() const { return made_[kSource]; }
  const nanobind::object& rows_of_expert() const { return made_[kRowsOfExpert]; }
  const nanobind::object& last_equal() const { return made_[kLastEqual]; }

 private:
  enum : std::size_t {
    kRowsThroughRank,
    kExpertEnds,
    kRowsOfExpert,
    kOrigin,
    kSource,
    kNumTogether,
    kIds = kNumTogether,
    kLastEqual,
    kNumTables
  };

  /// Cuts a table to its first `num_rows` rows, or makes a larger one.
  void keep_rows(std::size_t table, std::int64_t num_rows);
  TensorView view(std::size_t table) const;

  const Calls& calls_;
  HandleShape shape_;
  ConstTensorView sent_ids_;
  std::array<bool, kNumTables> is_wanted_{};
  std::array<Wanted, kNumTables> wanted_;
  std::array<nanobind::object, kNumTables> made_;
  bool is_made_ = false;
};

}  // namespace ferry::python::deep_ep

#endif  // FERRY_PYTHON_DEEP_EP_HANDLE_TABLES_HPP

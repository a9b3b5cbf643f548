#ifndef FERRY_BOOTSTRAP_SLURM_HPP
#define FERRY_BOOTSTRAP_SLURM_HPP

/// Values of variables that Slurm sets.

#include <string>
#include <string_view>

namespace ferry::bootstrap {

/// Whether `step_id`, the value of SLURM_STEP_ID or null, is that of a step whose ranks srun started. In a batch script
/// or a shell Slurm sets a rank and a number of tasks, too, but has started no other rank.
bool is_step_of_srun(const char* step_id);

/// First host of a node list such as "gpu[03-07,9],login1"; empty if the list has another form.
std::string first_host_of_node_list(std::string_view node_list);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_SLURM_HPP

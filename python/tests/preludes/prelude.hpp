// Names that snippets of the documentation use and do not declare. Declared alone: snippets are compiled, not linked.
// Namespace page_NAME is for names that one page uses alone, or with another type.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"

namespace any_page {
extern std::shared_ptr<ferry::Bootstrap> bootstrap;
extern std::shared_ptr<ferry::Group> group;
extern ferry::RouteInput choice;
extern ferry::RouteOptions options;
extern ferry::Routing routing;
extern ferry::DispatchInput send;
extern ferry::DispatchOutput receive;
extern ferry::CombineInput give_back;
extern ferry::CombineOutput sums;
extern ferry::Status status;
extern ferry::ConstTensorView load;
extern std::int64_t num_experts;
extern int num_ranks;
}  // namespace any_page

// Declared as in the CUDA runtime, whose headers need not be here.
namespace page_cuda {
struct CapturedGraph;
enum CaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
extern void* cuda_stream;
extern CapturedGraph* graph;
extern ferry::Stream stream;
extern ferry::RouteOptions bounded;
int cudaStreamBeginCapture(void* stream, CaptureMode mode);
int cudaStreamEndCapture(void* stream, CapturedGraph** graph);
void warm_up();
void run_experts(void* stream);
}  // namespace page_cuda

namespace page_experts {
extern std::shared_ptr<ferry::Group> new_group;
extern ferry::ConstTensorView before, after;
extern ferry::TensorView topk_idx, topk_weights;
extern ferry::Placement placement;
extern std::int64_t* homeless;
void start(const ferry::ExpertCopy& copy);
void finish_on_all_ranks();
}  // namespace page_experts

namespace page_experts_load {
extern std::int64_t *logical_load, *waits;
extern std::int32_t* received;
extern std::int64_t num_layers, num_physical_experts, num_local_experts, layer;
void write(const std::string& json);
}  // namespace page_experts_load

namespace page_gating {
extern ferry::ConstTensorView logits, bias;
extern ferry::TensorView topk_idx, topk_weights;
extern ferry::Stream stream;
}  // namespace page_gating

namespace page_latency_gpus {
extern std::string backend;
extern ferry::GroupOptions group_options;
}  // namespace page_latency_gpus

namespace page_latency {
extern ferry::TensorView y, out;
template <typename Counts>
void run_experts(const ferry::TensorView& slab, const Counts& num_rows, const ferry::TensorView& y);
}  // namespace page_latency

namespace page_membership {
struct Graph;
struct Inputs;
extern Graph* graph;
extern std::string address, secret;
extern int lost_id;
extern std::uint64_t num_steps;
extern ferry::GroupOptions options;
extern ferry::Stream stream;
extern std::shared_ptr<ferry::Membership> members;
ferry::Status train_step(ferry::Group& group, std::uint64_t step);
void capture(Graph* graph, ferry::Group& group);
Inputs* inputs_of(std::uint64_t step);
void replay(Graph* graph, Inputs* inputs);
}  // namespace page_membership

namespace page_one_sided {
extern int next;
extern std::vector<float> mine;
}  // namespace page_one_sided

#include "common/timing.hpp"

#include <algorithm>
#include <cmath>

namespace ferry::tools {

std::int64_t percentile(std::vector<std::int64_t> samples, double percent) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const auto num_samples = static_cast<double>(samples.size());
  const auto position = static_cast<std::size_t>(std::max(1.0, std::ceil(num_samples * percent / 100.0)));
  return samples[std::min(position, samples.size()) - 1];
}

}  // namespace ferry::tools

#include "demo/text_tokens.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>

#include "common/bfloat16.hpp"
#include "common/hash.hpp"
#include "common/read_file.hpp"

namespace ferry::tools {

namespace {

/// Number of bytes that a token's embedding depends on, itself included, and the weight of each earlier byte relative
/// to the next: a quarter of the total remains after two bytes, 6 % after eight.
constexpr std::int64_t kWindow = 8;
constexpr float kDecay = 0.7F;

constexpr std::size_t kNumBytes = 256;

constexpr const char* kEmbeddedText =
    "Ferry carries tokens to their experts and back. A mixture-of-experts layer keeps many small feed-forward "
    "networks, "
    "the experts, on many ranks, and a router that picks a few of them for every token. Dispatch sends each token to "
    "the "
    "ranks that own its experts; there every expert works through the tokens it was given, and combine brings the "
    "results back and adds them up, weighted as the router said. The ranks agree once on how many tokens go where; "
    "from "
    "then on the source knows the final row of each token on each destination, and everybody else only moves bytes. "
    "Nothing is sorted, nothing is sent twice, and the sums are always made in the same order, so that two runs give "
    "the same bits. This paragraph is here for the case that the documents of the project are not at hand.\n";

/// README.md and docs/*.md of the source folder, in a fixed order.
Text read_documents(std::size_t max_bytes) {
  namespace fs = std::filesystem;
  const fs::path root(FERRY_SOURCE_DIR);
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "docs", ignored)) {
    if (entry.path().extension() == ".md") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  paths.insert(paths.begin(), (root / "README.md").string());
  Text text;
  int num_documents = 0;
  for (const std::string& path : paths) {
    if (auto bytes = read_file(path, "the text", max_bytes); bytes && !bytes->empty()) {
      text.bytes += *bytes;
      ++num_documents;
    }
  }
  text.origin = fmt::format("this project's documents ({} files)", num_documents);
  return text;
}

float mean_square(const std::vector<float>& row) {
  float sum = 0.0F;
  for (float value : row) sum += value * value;
  return sum / static_cast<float>(row.size());
}

}  // namespace

Result<Text> load_text(const std::string& path, std::int64_t max_bytes) {
  const auto most = static_cast<std::size_t>(max_bytes);
  if (path.empty()) {
    Text text = read_documents(most);
    if (text.bytes.empty()) text = {kEmbeddedText, "the text built into this program"};
    return text;
  }
  auto bytes = read_file(path, "the text", most);
  if (!bytes) return bytes.status();
  if (bytes->empty()) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("the text {} is empty; give a file with some text", path));
  }
  return Text{std::move(*bytes), path};
}

std::vector<std::uint16_t> embed_tokens(const std::string& text, std::int64_t first, std::int64_t count,
                                        const EmbeddingShape& shape) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  std::vector<float> table(kNumBytes * hidden);
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = signed_unit_float(static_cast<std::uint32_t>(splitmix64(shape.seed + i)));
  }
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(count) * hidden);
  std::vector<float> row(hidden);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t token = first + i;
    std::fill(row.begin(), row.end(), 0.0F);
    float factor = 1.0F;
    for (std::int64_t back = 0; back < std::min(kWindow, token + 1); ++back) {
      const auto byte = static_cast<unsigned char>(text[static_cast<std::size_t>(token - back)]);
      const float* embedding = &table[byte * hidden];
      for (std::size_t h = 0; h < hidden; ++h) row[h] += factor * embedding[h];
      factor *= kDecay;
    }
    const float norm = 1.0F / std::sqrt(mean_square(row));
    std::uint16_t* out = &rows[static_cast<std::size_t>(i) * hidden];
    for (std::size_t h = 0; h < hidden; ++h) out[h] = bfloat16_from_float(row[h] * norm);
  }
  return rows;
}

}  // namespace ferry::tools

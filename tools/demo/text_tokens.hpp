#ifndef FERRY_TOOLS_DEMO_TEXT_TOKENS_HPP
#define FERRY_TOOLS_DEMO_TEXT_TOKENS_HPP

/// Real text as input of the layer: every byte is a token.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/status.hpp"

namespace ferry::tools {

struct Text {
  std::string bytes;   ///< never empty
  std::string origin;  ///< for display: a file's name, or the project's documents
};

/// Text of the file at `path`; if that is empty, this project's own documents if the source folder still exists,
/// otherwise a short text that is part of the program. Reads at least the first `max_bytes` of a file if it has them.
/// @errors kSystem: cannot be read; kInvalidArgument: empty
Result<Text> load_text(const std::string& path, std::int64_t max_bytes);

/// Embedding of tokens [first, first + count) of `text` as [count, hidden] bf16, each row with mean square 1. A row
/// depends on its byte and, with decreasing weight, on the few bytes before it, so that equal bytes make different
/// tokens. It is a pure function of the text and the seed: every rank that computes a part of it gets the same bits.
struct EmbeddingShape {
  std::int64_t hidden = 0;
  std::uint64_t seed = 0;
};
std::vector<std::uint16_t> embed_tokens(const std::string& text, std::int64_t first, std::int64_t count,
                                        const EmbeddingShape& shape);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_TEXT_TOKENS_HPP

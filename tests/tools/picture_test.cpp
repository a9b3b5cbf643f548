/// `ferry demo --picture`: well-formed XML with a cell for every pair of ranks and a bar for every expert.

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

/// Checks the XML rules that a program writing XML can break: nesting of tags, quotes around attributes, escaped
/// characters. find_fault returns an empty string, or the first fault.
class XmlCheck {
 public:
  explicit XmlCheck(std::string_view text) : text_(text) {}

  std::string find_fault() {
    if (text_.starts_with("<?xml")) at_ = text_.find("?>") + 2;
    while (fault_.empty() && at_ < text_.size()) {
      if (text_[at_] == '<') {
        tag();
      } else if (text_[at_] == '&') {
        entity();
      } else {
        ++at_;
      }
    }
    if (fault_.empty() && !open_.empty()) fault_ = "not closed: " + open_.back();
    if (fault_.empty() && num_elements_ == 0) fault_ = "no element";
    return fault_;
  }

 private:
  void fail(const std::string& what) {
    if (fault_.empty()) fault_ = what + " at " + std::string(text_.substr(at_, 40));
    at_ = text_.size();
  }

  std::string name() {
    const std::size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '-' || text_[at_] == ':')) {
      ++at_;
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  void entity() {
    const std::size_t end = text_.find(';', at_);
    const std::string_view word = end == std::string_view::npos ? "" : text_.substr(at_, end - at_);
    if (word != "&amp" && word != "&lt" && word != "&gt" && word != "&quot" && word != "&#39") return fail("bare &");
    at_ = end + 1;
  }

  void tag() {
    ++at_;
    if (at_ < text_.size() && text_[at_] == '/') {
      ++at_;
      const std::string closed = name();
      if (open_.empty() || open_.back() != closed) return fail("closes " + closed);
      open_.pop_back();
      if (at_ >= text_.size() || text_[at_] != '>') return fail("bad end of a tag");
      ++at_;
      return;
    }
    const std::string opened = name();
    if (opened.empty()) return fail("bare <");
    ++num_elements_;
    while (at_ < text_.size() && text_[at_] == ' ') {
      ++at_;
      attribute();
    }
    if (text_.substr(at_).starts_with("/>")) {
      at_ += 2;
    } else if (text_.substr(at_).starts_with(">")) {
      open_.push_back(opened);
      ++at_;
    } else {
      fail("bad end of a tag");
    }
  }

  void attribute() {
    if (name().empty() || !text_.substr(at_).starts_with("=\"")) return fail("bad attribute");
    at_ += 2;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '<') return fail("< in an attribute");
      if (text_[at_] == '&') {
        entity();
      } else {
        ++at_;
      }
    }
    ++at_;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t num_elements_ = 0;
  std::vector<std::string> open_;
  std::string fault_;
};

TEST(XmlCheck, SeesWhatIsWrong) {
  EXPECT_EQ(XmlCheck("<?xml version=\"1.0\"?>\n<a b=\"1\"><c/>x &amp; y</a>\n").find_fault(), "");
  for (const char* wrong :
       {"", "<a>", "<a></b>", "<a b=1/>", "<a>x & y</a>", "<a>x < y</a>", "<a b=\"<\"/>", "<a/></a>"}) {
    EXPECT_NE(XmlCheck(wrong).find_fault(), "") << wrong;
  }
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t number = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++number;
  return number;
}

std::string picture_of(std::vector<std::string> more, int expected_exit_code = 0) {
  const TemporaryFile file;
  std::vector<std::string> arguments = {"demo", "--tokens", "16", "--scale", "64", "--picture", file.path()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const CommandEnd end = run_ferry(arguments);
  EXPECT_EQ(end.exit_code, expected_exit_code) << end.standard_output << end.standard_error;
  return file.read();
}

TEST(Picture, HasACellForEveryPairAndABarForEveryExpert) {
  for (const int ranks : {1, 3, 20}) {
    const std::string svg = picture_of({"--backend", "cpu", "--ranks", std::to_string(ranks)});
    EXPECT_EQ(XmlCheck(svg).find_fault(), "");
    EXPECT_EQ(count(svg, "class=\"cell\""), static_cast<std::size_t>(ranks * ranks));
    EXPECT_EQ(count(svg, "class=\"bar\""), 256U);
    EXPECT_EQ(count(svg, "class=\"node\""), 0U);
    EXPECT_EQ(count(svg, "href"), 0U) << "a picture needs nothing from elsewhere";
  }
}

TEST(Picture, OutlinesNodes) {
  const std::string svg = picture_of({"--ranks", "4", "--nodes", "2"});
  EXPECT_EQ(XmlCheck(svg).find_fault(), "");
  EXPECT_EQ(count(svg, "class=\"cell\""), 16U);
  EXPECT_EQ(count(svg, "class=\"node\""), 2U);
}

TEST(Picture, EscapesWhatATraceCallsItsModel) {
  const TemporaryFile trace(R"({"type": "meta", "model": "Qwen <&\">", "num_experts": 5, "topk": 1}
{"topk_ids": [4], "topk_weights": [0.5]}
{"topk_ids": [0], "topk_weights": [0.5]})");
  const std::string svg = picture_of({"--backend", "cpu", "--ranks", "2", "--trace", trace.path()});
  EXPECT_EQ(XmlCheck(svg).find_fault(), "");
  EXPECT_EQ(count(svg, "class=\"bar\""), 5U);
}

TEST(Picture, SaysThatAResultIsWrong) {
  const std::string svg = picture_of({"--backend", "cpu", "--ranks", "2", "--spoil-token", "3"}, 1);
  EXPECT_EQ(XmlCheck(svg).find_fault(), "");
  EXPECT_EQ(count(svg, "MISMATCH"), 1U);
}

TEST(Picture, RefusesAPathBeforeTheRun) {
  for (const char* path : {"/no/such/folder/x.svg", "-"}) {
    const CommandEnd end = run_ferry({"demo", "--picture", path});
    EXPECT_EQ(end.exit_code, 2) << path;
    EXPECT_EQ(end.standard_output, "") << path;
    EXPECT_NE(end.standard_error.find("picture"), std::string::npos) << end.standard_error;
  }
}

}  // namespace
}  // namespace ferry::testing

/// Addresses and messages that an engine refuses: they come over the network.

#include <random>

#include "net/blob.hpp"
#include "unit/net_engine.hpp"

namespace ferry::test {
namespace {

using testing::HasSubstr;

/// Engine's own part of the blob of `end`.
net::Blob own_part_of(const NetEnd& end, const net::Blob& blob) {
  const auto own_part = net::parse_blob(blob, end.engine->name(), end.options, end.options.self).value();
  return {own_part.begin(), own_part.end()};
}

TEST_P(NetEngine, TruncatedBlobsAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  EXPECT_LE(good[1].size(), net::kMaxBlobBytes);
  for (std::size_t length = 0; length < good[1].size(); ++length) {
    std::vector<net::Blob> bad = good;
    bad[1].resize(length);
    const Status status = ends.connect(0, bad);
    ASSERT_EQ(status.code(), ErrorCode::kTransport) << "length " << length;
    EXPECT_EQ(status.peer(), 1);
  }
  EXPECT_TRUE(ends.connect(0, good).ok());
}

TEST_P(NetEngine, CorruptedBlobsAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  for (std::size_t place = 0; place < good[1].size(); ++place) {
    std::vector<net::Blob> bad = good;
    bad[1][place] ^= std::byte{0x10};
    ASSERT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport) << "byte " << place;
  }
  std::mt19937_64 random(4);
  for (int i = 0; i < 2000; ++i) {
    std::vector<net::Blob> bad = good;
    bad[1] = net_pattern(random() % 400, random());
    ASSERT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport);
  }
  std::vector<net::Blob> longer = good;
  longer[1].push_back(std::byte{0});
  EXPECT_EQ(ends.connect(0, longer).code(), ErrorCode::kTransport);
  longer[1].resize(net::kMaxBlobBytes + 1);
  EXPECT_EQ(ends.connect(0, longer).code(), ErrorCode::kTransport);
}

TEST_P(NetEngine, OwnPartsOfWrongLengthAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  const net::Blob own_part = own_part_of(ends[1], good[1]);
  for (std::size_t length = 0; length < own_part.size(); ++length) {
    std::vector<net::Blob> bad = good;
    bad[1] = net::make_blob(ends[1].engine->name(), ends[1].options, std::span(own_part).first(length)).value();
    ASSERT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport) << "length " << length;
  }
  net::Blob longer = own_part;
  longer.push_back(std::byte{0});
  std::vector<net::Blob> bad = good;
  bad[1] = net::make_blob(ends[1].engine->name(), ends[1].options, longer).value();
  EXPECT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport);
}

TEST_P(NetEngine, EndsThatDoNotFitAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  const net::Blob own_part = own_part_of(ends[1], good[1]);
  const auto expect_refused = [&](std::string_view engine, const net::EngineOptions& options, std::string_view words) {
    std::vector<net::Blob> bad = good;
    bad[1] = net::make_blob(engine, options, own_part).value();
    const Status status = ends.connect(0, bad);
    EXPECT_EQ(status.code(), ErrorCode::kTransport);
    EXPECT_THAT(status.message(), HasSubstr(std::string(words)));
  };
  expect_refused("carrier pigeon", ends[1].options, "carrier pigeon");
  net::EngineOptions options = ends[1].options;
  options.memory = options.memory.first(100);
  expect_refused(ends[1].engine->name(), options, "100 bytes of memory, expected 65536");
  options = ends[1].options;
  options.self = 0;
  expect_refused(ends[1].engine->name(), options, "end 0 of 2");
  options = ends[1].options;
  options.num_channels = 7;
  expect_refused(ends[1].engine->name(), options, "with 7 channels, expected end 1 of 2 with 1");
  EXPECT_FALSE(ends.connect(0, {}).ok());
}

TEST_P(NetEngine, MessagesWithAWrongTokenAreIgnored) {
  NetEnds ends(GetParam(), {.timeout_ns = 100'000'000});
  const std::vector<net::Blob> good = ends.addresses();
  net::Blob own_part = own_part_of(ends[1], good[1]);
  own_part[0] ^= std::byte{1};
  std::vector<net::Blob> wrong = good;
  wrong[1] = net::make_blob(ends[1].engine->name(), ends[1].options, own_part).value();
  ASSERT_TRUE(ends.connect(0, wrong).ok());
  ASSERT_TRUE(ends.connect(1, good).ok());
  ends[0].engine->notify(1, 0, 1);
  ends[1].engine->notify(0, 0, 1);
  EXPECT_TRUE(ends.poll_until([&] { return ends[0].highest(1, 0) == 1; }));
  for (int i = 0; i < 1000; ++i) ends.poll();
  EXPECT_TRUE(ends[1].heard.empty());
}

}  // namespace
}  // namespace ferry::test

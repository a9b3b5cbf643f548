/// Parsers of received bytes, proofs of the handshake, and the frames that a channel accepts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <random>

#include "bootstrap/channel.hpp"
#include "bootstrap/handshake.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::bootstrap {
namespace {

using test::bytes_of;

HeaderBytes header_of(std::uint16_t type, std::uint32_t length) {
  return encode_header({static_cast<FrameType>(type), length});
}

TEST(FrameHeader, SurvivesTheWire) {
  const Result<FrameHeader> parsed = parse_header(encode_header({FrameType::kMessage, 12'345}));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->type, FrameType::kMessage);
  EXPECT_EQ(parsed->payload_bytes, 12'345U);
}

TEST(FrameHeader, LengthsOutsideATypesBoundAreRefused) {
  constexpr auto kMessage = static_cast<std::uint16_t>(FrameType::kMessage);
  constexpr auto kWelcome = static_cast<std::uint16_t>(FrameType::kWelcome);
  constexpr auto kFailure = static_cast<std::uint16_t>(FrameType::kFailure);
  EXPECT_TRUE(parse_header(header_of(kMessage, kMaxBootstrapMessageBytes)).ok());
  EXPECT_FALSE(parse_header(header_of(kMessage, kMaxBootstrapMessageBytes + 1)).ok());
  EXPECT_FALSE(parse_header(header_of(kMessage, UINT32_MAX)).ok());
  EXPECT_FALSE(parse_header(header_of(kWelcome, 1)).ok());
  EXPECT_FALSE(parse_header(header_of(kFailure, 7)).ok());
}

TEST(FrameHeader, UnknownTypesAndMagicsAreRefused) {
  EXPECT_FALSE(parse_header(header_of(0, 0)).ok());
  EXPECT_FALSE(parse_header(header_of(9, 0)).ok());
  HeaderBytes other_protocol = header_of(3, 0);
  other_protocol[0] = std::byte{'G'};
  EXPECT_FALSE(parse_header(other_protocol).ok());
  HeaderBytes reserved_used = header_of(3, 0);
  reserved_used[6] = std::byte{1};
  EXPECT_FALSE(parse_header(reserved_used).ok());
}

class Handshake : public testing::Test {
 protected:
  Handshake() {
    EXPECT_TRUE(fill_random(root_nonce_).ok());
    EXPECT_TRUE(fill_random(hello_.nonce).ok());
    EXPECT_TRUE(fill_random(hello_.instance).ok());
    hello_.rank = 3;
    hello_.num_ranks = 8;
    hello_.version = "1.2.3";
  }

  Nonce root_nonce_{};
  Hello hello_;
};

TEST_F(Handshake, RootReadsTheHelloOfAPeerThatKnowsTheSecret) {
  const HelloFrame frame = make_hello("secret", root_nonce_, hello_).value();
  const Result<Hello> read = verify_hello("secret", root_nonce_, frame);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_EQ(read->rank, 3U);
  EXPECT_EQ(read->num_ranks, 8U);
  EXPECT_EQ(read->version, "1.2.3");
  EXPECT_EQ(read->instance, hello_.instance);
}

TEST_F(Handshake, AnotherSecretOrAnOldChallengeIsNoProof) {
  const HelloFrame frame = make_hello("secret", root_nonce_, hello_).value();
  EXPECT_FALSE(verify_hello("secreT", root_nonce_, frame).ok());
  Nonce next_challenge = root_nonce_;
  next_challenge[31] ^= std::byte{1};
  EXPECT_FALSE(verify_hello("secret", next_challenge, frame).ok());
}

TEST_F(Handshake, ProofCoversEveryByteOfTheHello) {
  const HelloFrame frame = make_hello("secret", root_nonce_, hello_).value();
  for (std::size_t i = 0; i < frame.size(); ++i) {
    HelloFrame changed = frame;
    changed[i] ^= std::byte{1};
    EXPECT_FALSE(verify_hello("secret", root_nonce_, changed).ok()) << "byte " << i;
  }
}

TEST_F(Handshake, DirectionsAndSessionsHaveTheirOwnKeys) {
  const SessionKeys keys = derive_session_keys("secret", root_nonce_, hello_).value();
  EXPECT_NE(keys.root_to_peer, keys.peer_to_root);
  Hello next = hello_;
  next.nonce[0] ^= std::byte{1};
  EXPECT_NE(derive_session_keys("secret", root_nonce_, next)->root_to_peer, keys.root_to_peer);
}

TEST_F(Handshake, VersionIsPlainText) {
  for (const std::string& version : {std::string(""), std::string("1\n2"), std::string("1\0x", 3)}) {
    hello_.version = version;
    const HelloFrame frame = make_hello("secret", root_nonce_, hello_).value();
    EXPECT_FALSE(verify_hello("secret", root_nonce_, frame).ok());
  }
}

TEST(Parsers, AcceptAnyBytes) {
  std::minstd_rand random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> bytes(random() % 200);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
    (void)parse_hello(bytes);
    (void)parse_failure(bytes);
    if (bytes.size() >= kHeaderBytes) {
      EXPECT_FALSE(parse_header(std::span(bytes).first<kHeaderBytes>()).ok());
    }
  }
}

TEST(FailureFrame, KeepsCodePeerAndText) {
  const Failure failure = parse_failure(encode_failure(Status(ErrorCode::kPeerLost, "rank 7 left", 7))).value();
  EXPECT_EQ(failure.to_status().to_string(), "kPeerLost: rank 7 left");
  EXPECT_EQ(failure.peer, 7);
  EXPECT_EQ(parse_failure(encode_failure(Status(ErrorCode::kSystem, "x")))->peer, -1);
}

TEST(FailureFrame, LongTextIsCutToWhatReceiversAccept) {
  const std::vector<std::byte> bytes = encode_failure(Status(ErrorCode::kSystem, std::string(5000, 'x')));
  const auto length = static_cast<std::uint32_t>(bytes.size());
  EXPECT_TRUE(parse_header(encode_header({FrameType::kFailure, length})).ok());
  EXPECT_EQ(parse_failure(bytes)->text.size(), kMaxFailureTextBytes);
}

/// A channel connected to a plain socket, so that the test can record and modify the bytes in between.
class Channels : public testing::Test {
 protected:
  Channels() {
    EXPECT_TRUE(fill_random(keys_.send).ok());
    EXPECT_TRUE(fill_random(keys_.receive).ok());
  }

  static std::pair<UniqueFd, UniqueFd> make_pair() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }

  /// Bytes that a channel with these keys sends.
  std::vector<std::byte> record(const std::vector<std::string>& payloads) const {
    auto [near, far] = make_pair();
    Channel sender(std::move(near), keys_);
    for (const std::string& payload : payloads) EXPECT_TRUE(sender.queue(FrameType::kMessage, bytes_of(payload)).ok());
    EXPECT_TRUE(sender.flush());
    std::vector<std::byte> bytes(4096);
    bytes.resize(read_some(far.get(), bytes).num_bytes);
    return bytes;
  }

  /// Payloads that the receiving channel accepts from `bytes`, and its last outcome.
  std::pair<std::vector<std::string>, ReceiveOutcome> replay(const std::vector<std::byte>& bytes) const {
    auto [near, far] = make_pair();
    Channel receiver(std::move(near), {.send = keys_.receive, .receive = keys_.send});
    EXPECT_EQ(write_some(far.get(), bytes).num_bytes, bytes.size());
    std::vector<std::string> payloads;
    Frame frame;
    ReceiveOutcome outcome = receiver.receive(&frame);
    for (; outcome == ReceiveOutcome::kFrame; outcome = receiver.receive(&frame)) {
      payloads.push_back(test::text_of(frame.payload));
    }
    return {payloads, outcome};
  }

  ChannelKeys keys_;
};

TEST_F(Channels, UnmodifiedFramesArrive) {
  const auto [payloads, outcome] = replay(record({"one", "", "three"}));
  EXPECT_THAT(payloads, testing::ElementsAre("one", "", "three"));
  EXPECT_EQ(outcome, ReceiveOutcome::kWouldBlock);
}

TEST_F(Channels, EveryModifiedByteIsDetected) {
  const std::vector<std::byte> bytes = record({"payload"});
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::vector<std::byte> changed = bytes;
    changed[i] ^= std::byte{1};
    const auto [payloads, outcome] = replay(changed);
    EXPECT_THAT(payloads, testing::IsEmpty()) << "byte " << i;
    // If the length grew, the receiver waits for more bytes.
    EXPECT_NE(outcome, ReceiveOutcome::kFrame);
  }
}

TEST_F(Channels, RepeatedFrameIsDetected) {
  const std::vector<std::byte> once = record({"pay"});
  std::vector<std::byte> twice = once;
  twice.insert(twice.end(), once.begin(), once.end());
  const auto [payloads, outcome] = replay(twice);
  EXPECT_THAT(payloads, testing::ElementsAre("pay"));
  EXPECT_EQ(outcome, ReceiveOutcome::kBroken);
}

TEST_F(Channels, ReflectedFrameIsDetected) {
  auto [near, far] = make_pair();
  Channel channel(std::move(near), keys_);
  const std::vector<std::byte> own = record({"mine"});
  ASSERT_EQ(write_some(far.get(), own).num_bytes, own.size());
  Frame frame;
  EXPECT_EQ(channel.receive(&frame), ReceiveOutcome::kBroken);
}

TEST_F(Channels, OverlongFrameIsRefusedByItsHeaderAlone) {
  auto [near, far] = make_pair();
  Channel channel(std::move(near), keys_);
  const HeaderBytes header = header_of(static_cast<std::uint16_t>(FrameType::kMessage), UINT32_MAX);
  ASSERT_EQ(write_some(far.get(), header).num_bytes, header.size());
  Frame frame;
  EXPECT_EQ(channel.receive(&frame), ReceiveOutcome::kBroken);
}

}  // namespace
}  // namespace ferry::bootstrap

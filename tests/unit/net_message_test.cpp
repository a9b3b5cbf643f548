/// Messages of the UCX engine, without UCX: authenticity, destinations of payloads, and order of delivery.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "net/blob.hpp"
#include "net/ucx/inbound.hpp"
#include "net/ucx/seal.hpp"

namespace ferry::test {
namespace {

using net::ucx::Inbound;
using net::ucx::KeyPair;
using net::ucx::Message;
using net::ucx::MessageKind;
using net::ucx::PairKeys;
using net::ucx::Seal;
using net::ucx::SealKey;
using net::ucx::Tag;
using net::ucx::TagMaker;
using testing::ElementsAre;

constexpr std::uint32_t kSender = 3;
constexpr std::uint32_t kNumChannels = 2;

/// Messages of one peer, and the end that receives them.
class NetMessage : public testing::Test {
 protected:
  Message sealed(Message message) {
    message.sender = kSender;
    EXPECT_TRUE(sending_.tag(message.sealed_bytes(), &message.tag));
    return message;
  }
  Message notify(std::uint64_t sequence, std::uint64_t value = 0) {
    return sealed({.kind = MessageKind::kNotify, .channel = 1, .sequence = sequence, .value = value});
  }
  Message put(std::uint64_t sequence, std::uint64_t offset, std::size_t num_bytes) {
    return sealed({.kind = MessageKind::kPut, .sequence = sequence, .value = offset, .payload_bytes = num_bytes});
  }
  std::vector<std::uint64_t> due_values() {
    std::vector<std::uint64_t> values;
    for (const Message& message : inbound_.take_due()) values.push_back(message.value);
    return values;
  }

  net::ucx::SealKey key_{std::byte{1}, std::byte{2}};
  Seal sending_ = Seal::make(key_).value();
  std::vector<std::byte> memory_ = std::vector<std::byte>(64);
  Inbound inbound_{Seal::make(key_).value(), {kSender, kNumChannels, memory_}};
  std::vector<std::byte> payload_ = std::vector<std::byte>(16, std::byte{0x55});
};

TEST_F(NetMessage, PayloadsGoWhereTheirHeaderSays) {
  EXPECT_TRUE(inbound_.accept(put(0, 48, 16), payload_));
  EXPECT_TRUE(std::all_of(memory_.begin(), memory_.begin() + 48, [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_TRUE(std::equal(payload_.begin(), payload_.end(), memory_.begin() + 48));
  EXPECT_FALSE(inbound_.has_due());
}

TEST_F(NetMessage, CountOnlyOnceAllBeforeThemHaveArrived) {
  EXPECT_TRUE(inbound_.accept(notify(3, 33), {}));
  EXPECT_TRUE(inbound_.accept(notify(1, 11), {}));
  EXPECT_TRUE(inbound_.accept(put(2, 0, 16), payload_));
  EXPECT_FALSE(inbound_.has_due());
  EXPECT_TRUE(inbound_.accept(put(0, 16, 16), payload_));
  EXPECT_THAT(due_values(), ElementsAre(11, 33));
  EXPECT_TRUE(inbound_.accept(notify(4, 44), {}));
  EXPECT_THAT(due_values(), ElementsAre(44));
  EXPECT_EQ(inbound_.num_dropped(), 0U);
}

TEST_F(NetMessage, OfAPutAndASignalHaveTheirBytesInPlaceWhenTheyAreDue) {
  const Message sent = sealed(
      {.kind = MessageKind::kPutAdd, .sequence = 1, .value = 8, .payload_bytes = 16, .operand = 3, .compare = 56});
  EXPECT_TRUE(inbound_.accept(sent, payload_));
  EXPECT_FALSE(inbound_.has_due());
  EXPECT_TRUE(inbound_.accept(put(0, 32, 16), payload_));
  const std::vector<Message> due = inbound_.take_due();
  ASSERT_EQ(due.size(), 1U);
  EXPECT_TRUE(std::equal(payload_.begin(), payload_.end(), memory_.begin() + 8));
  const auto op = net::ucx::atomic_in(due[0]);
  ASSERT_TRUE(op.has_value());
  EXPECT_EQ(op->kind, net::AtomicOp::Kind::kAdd);
  EXPECT_EQ(op->offset, 56U);
  EXPECT_EQ(op->operand, 3U);
}

TEST_F(NetMessage, OfAPutAndANotifyHaveTheirBytesInPlaceWhenTheyAreDue) {
  const Message sent =
      sealed({.kind = MessageKind::kPutNotify, .sequence = 1, .value = 8, .payload_bytes = 16, .operand = 3});
  EXPECT_TRUE(inbound_.accept(sent, payload_));
  EXPECT_FALSE(inbound_.has_due());
  EXPECT_TRUE(inbound_.accept(put(0, 32, 16), payload_));
  const std::vector<Message> due = inbound_.take_due();
  ASSERT_EQ(due.size(), 1U);
  EXPECT_TRUE(std::equal(payload_.begin(), payload_.end(), memory_.begin() + 8));
  EXPECT_EQ(due[0].operand, 3U);
}

TEST_F(NetMessage, CountOnce) {
  const Message first = notify(0, 1);
  const Message early = notify(2, 3);
  EXPECT_TRUE(inbound_.accept(first, {}));
  EXPECT_TRUE(inbound_.accept(early, {}));
  EXPECT_FALSE(inbound_.accept(first, {}));
  EXPECT_FALSE(inbound_.accept(early, {}));
  EXPECT_THAT(due_values(), ElementsAre(1));
  EXPECT_EQ(inbound_.num_dropped(), 2U);
  EXPECT_FALSE(inbound_.broken());
}

TEST_F(NetMessage, AreDroppedWhereOneBitDiffersFromWhatTheSenderMade) {
  const Message good = put(0, 0, 16);
  for (std::size_t bit = 0; bit < 8 * sizeof(Message); ++bit) {
    std::array<std::byte, sizeof(Message)> bytes{};
    std::copy_n(reinterpret_cast<const std::byte*>(&good), bytes.size(), bytes.begin());
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    const auto changed = net::ucx::parse_message(bytes);
    EXPECT_FALSE(changed && inbound_.accept(*changed, payload_)) << "bit " << bit;
  }
  EXPECT_TRUE(std::ranges::all_of(memory_, [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_FALSE(inbound_.broken());
  EXPECT_FALSE(inbound_.accept(good, std::span(payload_).first(15)));
  EXPECT_TRUE(inbound_.accept(good, payload_));
}

TEST_F(NetMessage, OfAnotherKeyAreDropped) {
  const Seal other = Seal::make({std::byte{1}, std::byte{3}}).value();
  Message message = notify(0);
  ASSERT_TRUE(other.tag(message.sealed_bytes(), &message.tag));
  EXPECT_FALSE(inbound_.accept(message, {}));
}

TEST_F(NetMessage, ThatBreakTheRulesEndTheConnection) {
  const std::array<Message, 20> all{put(0, 49, 16),
                                    put(0, UINT64_MAX, 16),
                                    put(0, 65, 0),
                                    sealed({.kind = MessageKind::kNotify, .channel = kNumChannels}),
                                    sealed({.kind = MessageKind::kNotify, .payload_bytes = 16}),
                                    sealed({.kind = MessageKind{0}}),
                                    sealed({.kind = MessageKind{27}}),
                                    sealed({.kind = MessageKind::kPutSet, .value = 49, .payload_bytes = 16}),
                                    sealed({.kind = MessageKind::kPutAdd, .payload_bytes = 16, .compare = 60}),
                                    sealed({.kind = MessageKind::kPutNotify, .value = 49, .payload_bytes = 16}),
                                    sealed({.kind = MessageKind::kAdd, .value = 64}),
                                    sealed({.kind = MessageKind::kSet, .value = 4}),
                                    sealed({.kind = MessageKind::kSwap, .value = UINT64_MAX - 7}),
                                    sealed({.kind = MessageKind::kXor, .value = 60}),
                                    sealed({.kind = MessageKind::kOr32, .value = 62}),
                                    sealed({.kind = MessageKind::kAnd32, .value = 64}),
                                    sealed({.kind = MessageKind::kAdd32, .operand = std::uint64_t{1} << 32}),
                                    sealed({.kind = MessageKind::kSwap32, .compare = std::uint64_t{1} << 32}),
                                    sealed({.kind = MessageKind::kGet, .value = 60, .operand = 5}),
                                    sealed({.kind = MessageKind::kFlush, .payload_bytes = 1})};
  for (std::size_t i = 0; i < all.size(); ++i) {
    Inbound inbound(Seal::make(key_).value(), {kSender, kNumChannels, memory_});
    EXPECT_FALSE(inbound.accept(all[i], std::span(payload_).first(all[i].payload_bytes))) << i;
    EXPECT_TRUE(inbound.broken()) << i;
    EXPECT_FALSE(inbound.accept(notify(0), {})) << i;
    EXPECT_FALSE(inbound.has_due()) << i;
  }
  EXPECT_TRUE(std::ranges::all_of(memory_, [](std::byte byte) { return byte == std::byte{0}; }));
}

/// After a get is reported complete, its caller may have freed the memory.
TEST_F(NetMessage, ThatAnswerAGetWriteNothingOnceItIsOver) {
  constexpr std::uint64_t kTicket = 9;
  const auto answer = [&](std::uint64_t sequence, std::uint64_t from, std::size_t num_bytes) {
    return sealed({.kind = MessageKind::kAnswer,
                   .sequence = sequence,
                   .payload_bytes = num_bytes,
                   .ticket = kTicket,
                   .operand = from});
  };
  const auto untouched = [](std::span<const std::byte> bytes) {
    return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
  };
  std::vector<std::byte> got(32);
  inbound_.expect(kTicket, got);
  EXPECT_TRUE(inbound_.accept(answer(0, 16, 16), payload_));
  ASSERT_EQ(inbound_.take_due().size(), 1U);
  std::ranges::fill(got, std::byte{0});
  EXPECT_TRUE(inbound_.accept(answer(1, 0, 16), payload_));
  EXPECT_TRUE(untouched(got)) << "after its last bytes";

  // Any end of a get: here an answer without bytes that arrives before the request and is processed after it.
  EXPECT_TRUE(inbound_.accept(answer(3, 0, 0), {}));
  inbound_.expect(kTicket, got);
  EXPECT_TRUE(inbound_.accept(notify(2), {}));
  EXPECT_EQ(inbound_.take_due().size(), 2U);
  EXPECT_TRUE(inbound_.accept(answer(4, 0, 16), payload_));
  EXPECT_TRUE(untouched(got)) << "after an answer without bytes";

  inbound_.expect(kTicket, got);
  inbound_.forget_gets();
  EXPECT_TRUE(inbound_.accept(answer(5, 0, 16), payload_));
  EXPECT_TRUE(untouched(got)) << "forgotten";
  EXPECT_FALSE(inbound_.has_due());

  inbound_.expect(kTicket, got);
  EXPECT_FALSE(inbound_.accept(answer(6, 0, 0), {}));
  EXPECT_TRUE(inbound_.broken()) << "no rank answers a get without bytes";
}

TEST_F(NetMessage, OfEndlessNumberBeforeOneThatIsMissingEndTheConnection) {
  for (std::uint64_t sequence = 1; !inbound_.broken() && sequence <= Inbound::kMaxEarly + 1; ++sequence) {
    inbound_.accept(notify(sequence), {});
  }
  EXPECT_TRUE(inbound_.broken());
}

TEST_F(NetMessage, OfAReceiverFarAheadOfTheRestWaitForIt) {
  using net::ucx::Way;
  for (const bool comes : {true, false}) {
    Inbound inbound(Seal::make(key_).value(), {kSender, kNumChannels, memory_});
    for (std::uint64_t sequence = 1; sequence <= Inbound::kFarAhead; ++sequence) {
      ASSERT_FALSE(inbound.is_receiver_ahead()) << sequence;
      ASSERT_TRUE(inbound.accept(put(sequence, 0, 16), payload_, Way::kReceiver));
    }
    EXPECT_TRUE(inbound.is_receiver_ahead());
    if (comes) {
      EXPECT_TRUE(inbound.accept(notify(0), {}, Way::kWorker));
    } else {
      inbound.end();  // puts of other peers use the same receiver
    }
    EXPECT_FALSE(inbound.is_receiver_ahead());
    EXPECT_FALSE(inbound.broken());
  }
}

TEST_F(NetMessage, OfTwoThreadsCountInTheOrderOfTheirNumbersWithTheirBytesInPlace) {
  using net::ucx::Way;
  constexpr std::uint64_t kNumPuts = 2000;
  memory_.resize(kNumPuts * payload_.size());
  Inbound inbound(Seal::make(key_).value(), {kSender, kNumChannels, memory_});
  std::vector<Message> puts;
  std::vector<Message> notifies;
  for (std::uint64_t i = 0; i < kNumPuts; ++i) {
    puts.push_back(put(2 * i, i * payload_.size(), payload_.size()));
    notifies.push_back(notify(2 * i + 1, i));
  }
  std::jthread receiver([&] {
    for (const Message& message : puts) inbound.accept(message, payload_, Way::kReceiver);
  });
  std::jthread worker([&] {
    for (const Message& message : notifies) inbound.accept(message, {}, Way::kWorker);
  });
  std::uint64_t next = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (next < kNumPuts && std::chrono::steady_clock::now() < deadline) {
    if (!inbound.has_due()) std::this_thread::yield();
    for (const Message& message : inbound.take_due()) {
      ASSERT_EQ(message.value, next);
      const auto bytes = memory_.begin() + static_cast<std::ptrdiff_t>(next * payload_.size());
      ASSERT_TRUE(std::equal(payload_.begin(), payload_.end(), bytes)) << next;
      ++next;
    }
  }
  EXPECT_EQ(next, kNumPuts);
  EXPECT_EQ(inbound.num_dropped(), 0U);
}

TEST(NetSeal, BothEndsOfAPairDeriveTheSameKeysAndNoOtherEnd) {
  const KeyPair one = KeyPair::make().value();
  const KeyPair two = KeyPair::make().value();
  const KeyPair stranger = KeyPair::make().value();
  const net::Token first = net::make_token().value();
  const net::Token second = net::make_token().value();
  const PairKeys ours = one.agree(two.public_key(), first, second).value();
  const PairKeys theirs = two.agree(one.public_key(), second, first).value();
  EXPECT_EQ(ours.sending, theirs.receiving);
  EXPECT_EQ(ours.receiving, theirs.sending);
  EXPECT_NE(ours.sending, ours.receiving);
  EXPECT_NE(stranger.agree(two.public_key(), first, second).value().sending, ours.sending);
}

TEST(NetSeal, KeysWithoutASecretAreRefused) {
  const KeyPair own = KeyPair::make().value();
  const net::Token token = net::make_token().value();
  EXPECT_EQ(own.agree({}, token, token).status().code(), ErrorCode::kTransport);
}

/// MAC computed by one call, without earlier state.
Tag mac_of(SealKey key, const std::vector<std::byte>& bytes) {
  Tag mac{};
  std::size_t num_bytes = 0;
  EXPECT_NE(EVP_Q_mac(nullptr, "SIPHASH", nullptr, nullptr, nullptr, key.data(), key.size(),
                      reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                      reinterpret_cast<unsigned char*>(mac.data()), mac.size(), &num_bytes),
            nullptr);
  EXPECT_EQ(num_bytes, mac.size());
  return mac;
}

class NetTags : public testing::TestWithParam<TagMaker> {
 protected:
  void SetUp() override {
    if (GetParam() == TagMaker::kFastest && net::ucx::sodium_siphash() == nullptr) {
      GTEST_SKIP() << "libsodium is not installed";
    }
  }
};

TEST_P(NetTags, AreMacsOfTheirBytesWhateverWasTaggedBefore) {
  const SealKey key{std::byte{7}, std::byte{9}};
  const Seal seal = Seal::make(key, GetParam()).value();
  for (const std::size_t num_bytes : {64U, 0U, 1U, 7U, 8U, 63U, 65U, 200U, 64U}) {
    std::vector<std::byte> bytes(num_bytes);
    for (std::size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
    Tag tag{};
    ASSERT_TRUE(seal.tag(bytes, &tag));
    EXPECT_EQ(tag, mac_of(key, bytes)) << num_bytes;
    EXPECT_TRUE(seal.matches(bytes, tag));
    tag.back() ^= std::byte{1};
    EXPECT_FALSE(seal.matches(bytes, tag));
  }
}

TEST_P(NetTags, DifferWhereZerosAreAdded) {
  const Seal seal = Seal::make({std::byte{7}}, GetParam()).value();
  const std::vector<std::byte> zeros(16);
  std::vector<Tag> tags;
  for (std::size_t num_bytes = 0; num_bytes <= zeros.size(); ++num_bytes) {
    Tag tag{};
    ASSERT_TRUE(seal.tag(std::span(zeros).first(num_bytes), &tag));
    EXPECT_EQ(std::ranges::find(tags, tag), tags.end()) << num_bytes;
    tags.push_back(tag);
  }
}

INSTANTIATE_TEST_SUITE_P(Makers, NetTags, testing::Values(TagMaker::kFastest, TagMaker::kOpenSsl),
                         [](const testing::TestParamInfo<TagMaker>& maker) {
                           return std::string(maker.param == TagMaker::kFastest ? "sodium" : "openssl");
                         });

}  // namespace
}  // namespace ferry::test

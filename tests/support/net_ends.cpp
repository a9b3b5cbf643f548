#include "support/net_ends.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace ferry::test {
namespace {

constexpr std::chrono::seconds kPatience{30};

}  // namespace

bool has_receivers(std::string_view name) { return name.ends_with(kWithReceivers); }

const net::EngineFactory& net_engine(std::string_view name) {
  if (has_receivers(name)) name.remove_suffix(kWithReceivers.size());
  for (const net::EngineFactory& factory : net::engine_factories()) {
    if (factory.name == name) return factory;
  }
  throw std::invalid_argument("no engine of that name");
}

std::uint64_t NetEnd::highest(int peer, int channel) const {
  const auto found = heard.find({peer, channel});
  return found == heard.end() ? 0 : *std::ranges::max_element(found->second);
}

NetEnds::NetEnds(std::string_view engine, const NetShape& shape) {
  for (int self = 0; self < shape.num_ends; ++self) {
    auto end = std::make_unique<NetEnd>();
    if (!shape.engine_allocates) end->owned.resize(shape.memory_bytes);
    if (shape.gpu_bytes > 0) {
      end->owned_gpu.resize(shape.gpu_bytes + net::gpu_probe_bytes(static_cast<std::size_t>(shape.num_ends)));
    }
    end->gpu = std::span(end->owned_gpu).first(shape.gpu_bytes);
    end->options.gpu_memory = end->owned_gpu;
    end->options.read_back_gpu_writes = shape.read_back_gpu_writes;
    end->options.self = self;
    end->options.num_peers = shape.num_ends;
    end->options.num_channels = shape.num_channels;
    end->options.memory = end->owned;
    end->options.memory_bytes = shape.engine_allocates ? shape.memory_bytes : 0;
    end->options.timeout_ns = shape.timeout_ns;
    end->options.may_start_receiver = has_receivers(engine);
    for (const int host : shape.hosts) {
      end->options.on_this_host.push_back(host == shape.hosts[static_cast<std::size_t>(self)]);
    }
    end->engine = net_engine(engine).create(end->options).value();
    end->memory = end->engine->memory();
    end->options.memory = end->memory;
    ends_.push_back(std::move(end));
  }
}

NetEnds::~NetEnds() {
  std::vector<int> all;
  for (int end = 0; end < size(); ++end) all.push_back(end);
  close(all);
}

std::vector<net::Blob> NetEnds::addresses() const {
  std::vector<net::Blob> addresses;
  for (const auto& end : ends_) addresses.push_back(end->engine->address().value());
  return addresses;
}

void NetEnds::connect() {
  const std::vector<net::Blob> all = addresses();
  for (int end = 0; end < size(); ++end) {
    throw_if_error(connect(end, all));
  }
}

Status NetEnds::connect(int index, const std::vector<net::Blob>& addresses) {
  NetEnd& end = (*this)[index];
  net::EngineEvents events;
  events.notified = [&end](int peer, int channel, std::uint64_t value) {
    end.heard[{peer, channel}].push_back(value);
    if (end.on_notified) end.on_notified(peer, channel, value);
  };
  events.lost = [&end](int peer, const Status& why) {
    ++end.num_lost_events;
    end.lost[peer] = why;
    if (end.on_lost) end.on_lost();
  };
  events.completed = [&end](int /*peer*/, std::uint64_t ticket, std::uint64_t value) { end.completed[ticket] = value; };
  return end.engine->connect(addresses, std::move(events));
}

bool NetEnds::poll() {
  bool moved = false;
  for (const auto& end : ends_) {
    if (end->engine != nullptr) moved |= end->engine->poll();
  }
  return moved;
}

bool NetEnds::poll_until(const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!done()) {
    poll();
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
  return true;
}

void NetEnds::close(const std::vector<int>& ends) {
  std::atomic<std::size_t> num_open{ends.size()};
  std::vector<std::thread> closers;
  std::vector<std::unique_ptr<net::Engine>> closing;
  for (const int end : ends) closing.push_back(std::move((*this)[end].engine));
  for (auto& engine : closing) {
    closers.emplace_back([&engine, &num_open] {
      if (engine != nullptr) engine->close();
      engine = nullptr;
      --num_open;
    });
  }
  while (num_open > 0) {
    if (!poll()) std::this_thread::yield();
  }
  for (std::thread& closer : closers) closer.join();
}

std::vector<std::byte> net_pattern(std::size_t count, std::uint64_t seed) {
  std::vector<std::byte> bytes(count);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

}  // namespace ferry::test

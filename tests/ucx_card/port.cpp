#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "ucx_card/end.hpp"
#include "ucx_card/objects.hpp"

namespace ferry::ucx_card {

Port::Port(std::shared_ptr<End> end, const ucp_context* context, std::uint64_t id, int event_fd)
    : end_(std::move(end)), context_(context), id_(id), event_fd_(event_fd) {
  mutex_.set_spins(end_->spins());
  sends.set_spins(end_->spins());
  receives.set_spins(end_->spins());
}

Port::~Port() { ::close(event_fd_); }

void Port::close() {
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  first_due_ns_ = kNever;
  news_.clear();
  coming_.clear();
}

bool Port::tell(News news) {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return false;
  first_due_ns_ = std::min(first_due_ns_.load(), news.due_ns);
  (news.due_ns == 0 ? news_ : coming_).push_back(std::move(news));
  if (!std::exchange(is_armed_, false)) return true;
  const std::uint64_t one = 1;
  (void)!::write(event_fd_, &one, sizeof one);
  return true;
}

void Port::take(std::size_t at_most, std::vector<News>* taken) {
  const std::uint64_t now = now_ns();
  const std::lock_guard lock(mutex_);
  // Messages first: a failure may be that of a peer that sent them before it left.
  for (std::deque<News>* const news : {&coming_, &news_}) {
    while (!news->empty() && news->front().due_ns <= now && taken->size() < at_most) {
      taken->push_back(std::move(news->front()));
      news->pop_front();
    }
  }
  first_due_ns_ = !news_.empty() ? 0 : !coming_.empty() ? coming_.front().due_ns : kNever;
}

bool Port::arm() {
  const std::lock_guard lock(mutex_);
  if (first_due_ns_ != kNever) return false;
  std::uint64_t count = 0;
  (void)!::read(event_fd_, &count, sizeof count);
  is_armed_ = true;
  return true;
}

}  // namespace ferry::ucx_card

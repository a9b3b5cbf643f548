#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "ucx_card/end.hpp"
#include "ucx_card/objects.hpp"

namespace ferry::ucx_card {

Port::Port(std::shared_ptr<End> end, const ucp_context* context, std::uint64_t id, int event_fd)
    : end_(std::move(end)), context_(context), id_(id), event_fd_(event_fd) {
  mutex_.set_spins(end_->spins());
}

Port::~Port() { ::close(event_fd_); }

void Port::close() {
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  has_news_ = false;
  news_.clear();
}

bool Port::tell(News news) {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return false;
  news_.push_back(std::move(news));
  has_news_ = true;
  if (!std::exchange(is_armed_, false)) return true;
  const std::uint64_t one = 1;
  (void)!::write(event_fd_, &one, sizeof one);
  return true;
}

void Port::take(std::size_t at_most, std::vector<News>* taken) {
  const std::lock_guard lock(mutex_);
  while (!news_.empty() && taken->size() < at_most) {
    taken->push_back(std::move(news_.front()));
    news_.pop_front();
  }
  has_news_ = !news_.empty();
}

bool Port::arm() {
  const std::lock_guard lock(mutex_);
  if (!news_.empty()) return false;
  std::uint64_t count = 0;
  (void)!::read(event_fd_, &count, sizeof count);
  is_armed_ = true;
  return true;
}

}  // namespace ferry::ucx_card

/// Probe of a card's access to the peer's GPU memory, and to this end's: registration may succeed where puts fail. Each
/// end has a part of the end of the peer's GPU memory. It writes the first word from host memory, so that its value is
/// known, and reads it back after a flush; it writes the rest from GPU memory, as chunks are.

#include <fmt/format.h>

#include "net/ucx/connection.hpp"

namespace ferry::net::ucx {
namespace {

/// Offset of the part of `end` in GPU memory of this size, and the part's bytes before those written from GPU memory.
std::size_t probe_offset(std::size_t gpu_bytes, std::size_t num_ends, std::size_t end) {
  return gpu_bytes - gpu_probe_bytes(num_ends - end);
}
constexpr std::size_t kFromHostBytes = 64;

}  // namespace

void Connection::begin_probe() {
  if (!usable()) return;
  const std::span<std::byte> memory = resources_.gpu_memory();
  const std::size_t offset = probe_offset(memory.size(), num_probed_ends_, self_);
  probe_ = Probe::kWriting;
  Operation* from_host = take_operation(Kind::kWrite);
  const ucp_request_param_t host_params = gpu_params_of(from_host, UCS_MEMORY_TYPE_HOST);
  probe_write_ = last_gpu_write_ = num_begun_writes_ = ++num_writes_;
  started(from_host,
          library_.put_nbx(endpoint_, &probe_word_, sizeof(probe_word_), gpu_base_ + offset, gpu_key_, &host_params));
  if (!usable()) return;
  Operation* from_gpu = take_operation(Kind::kWrite);
  const ucp_request_param_t gpu_params = gpu_params_of(from_gpu, UCS_MEMORY_TYPE_CUDA);
  probe_write_ = last_gpu_write_ = num_begun_writes_ = ++num_writes_;
  const std::span<std::byte> source = memory.subspan(offset, gpu_probe_bytes(1)).subspan(kFromHostBytes);
  started(from_gpu, library_.put_nbx(endpoint_, source.data(), source.size(), gpu_base_ + offset + kFromHostBytes,
                                     gpu_key_, &gpu_params));
  need(probe_write_);
}

void Connection::read_probe() {
  probe_ = Probe::kReading;
  const std::size_t offset = probe_offset(resources_.gpu_memory().size(), num_probed_ends_, self_);
  Operation* operation = take_operation(Kind::kProbe);
  const ucp_request_param_t params = gpu_params_of(operation, UCS_MEMORY_TYPE_HOST);
  started(operation, library_.get_nbx(endpoint_, &probe_read_word_, sizeof(probe_read_word_), gpu_base_ + offset,
                                      gpu_key_, &params));
}

/// The probe has been read back.
void Connection::check_probe() {
  if (probe_read_word_ != probe_word_) {
    probe_differs_ = true;
    fail(UCS_ERR_IO_ERROR);
    return;
  }
  probe_ = Probe::kDone;
  hello_due_ = true;
  recheck_waiting();
  attend();
}

Status Connection::probe_failure() const {
  const std::string reason = probe_differs_ ? "other bytes were read back than written"
                                            : std::string(ucx_status(failure_, "the first put", "", rank_).message());
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("network engine ucx: network cards do not reach the GPU memory of rank {}, or of this rank, "
                  "by {}: {}; see that nvidia-peermem is loaded or dma-buf works on both hosts and that "
                  "nothing (an IOMMU, PCI access control) keeps their cards from their GPUs, or set "
                  "GroupOptions::ring_memory to host",
                  rank_, gpu_path_, reason),
      rank_);
}

}  // namespace ferry::net::ucx

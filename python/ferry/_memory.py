"""Where new tensors of a group come from: its symmetric memory, on the host or on a GPU."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Sequence

import torch

from ferry import _native
from ferry._tensors import tensor_of

Sizes = tuple[int, ...]


class Wanted:
    """A tensor that a call has to make. ``moves``: it is worth symmetric memory wherever that costs something."""

    __slots__ = ("dtype", "moves", "sizes")

    def __init__(self, sizes: Sizes, dtype: torch.dtype, moves: bool = False) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.moves = moves


class HostMemory:
    """Of a CPU group."""

    def __init__(self, native: _native.Group, device: torch.device) -> None:
        self._native = native
        self._device = device

    def stream(self) -> int:
        """The handle of the stream that calls go to."""
        return 0

    def empty(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """In symmetric memory."""
        num_bytes = math.prod(sizes) * dtype.itemsize
        if num_bytes <= 0:
            return torch.empty(sizes, dtype=dtype, device=self._device)
        return tensor_of(self._native.allocate(num_bytes).array()).view(dtype).view(sizes)

    def outputs(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """What dispatch fills. Where ranks are processes, taking symmetric memory is slow on a CPU."""
        return [
            self.empty(one.sizes, one.dtype)
            if one.moves
            else torch.empty(one.sizes, dtype=one.dtype, device=self._device)
            for one in wanted
        ]

    def close(self) -> None: ...


@functools.cache
def _segment_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """Lives as long as the process: torch gives memory back through it to the end."""
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, "ferry_segment_alloc", "ferry_segment_free")


# What compilers of kernels use, too: an object for the stream, made anew in each call, would take longer than the rest.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class DeviceMemory:
    """Of a CUDA group: torch's caching allocator over segments of symmetric memory."""

    def __init__(self, native: _native.Group, device: torch.device) -> None:
        self._native = native
        self._device = device
        self._lock = threading.RLock()  # torch lets one thread at a time use a pool
        self._pool: torch.cuda.MemPool | None = self._new_pool()

    def _new_pool(self) -> torch.cuda.MemPool:
        with torch.cuda.device(self._device):
            return torch.cuda.MemPool(_segment_allocator().allocator())

    def stream(self) -> int:
        if _raw_stream is not None:
            return _raw_stream(self._device.index)
        return torch.cuda.current_stream(self._device).cuda_stream

    def _make(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [torch.empty(one.sizes, dtype=one.dtype, device=self._device) for one in wanted]

    def _make_symmetric(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        with self._lock:
            if self._pool is None:  # of a group that was destroyed: the call itself will say so
                return self._make(wanted)
            with torch.cuda.use_mem_pool(self._pool, self._device.index):  # a device takes longer to look up
                self._native.enter_pool()
                try:
                    return self._make(wanted)
                finally:
                    self._native.leave_pool()

    def _give_back_unused(self) -> None:
        """Memory that torch keeps for later: of the GPU, and the group's own. Waits for the GPU.

        torch gives a pool's unused segments back with the pool. Tensors on others keep theirs.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = self._new_pool()
        self._native.reclaim_segments()

    def _symmetric(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        try:
            return self._make_symmetric(wanted)
        except torch.OutOfMemoryError:
            with self._lock:
                if self._pool is None:
                    raise
                self._give_back_unused()
        return self._make_symmetric(wanted)

    def empty(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._symmetric([Wanted(sizes, dtype)])[0]
        except torch.OutOfMemoryError:
            self._native.raise_pool_error()  # says more, if the arena is what is full
            raise

    def outputs(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        if not wanted:
            return []
        # A graph's replays use the memory of its capture, which only torch's pool for that graph keeps for them.
        if torch.cuda.is_current_stream_capturing():
            return self._make(wanted)
        try:
            return self._symmetric(wanted)
        except torch.OutOfMemoryError:
            return self._make(wanted)  # slower, and does as well

    def close(self) -> None:
        """The group makes no calls any more. Waits for the GPU, whose kernels may use what is given back."""
        if self._pool is None or sys.is_finalizing():
            return
        if torch.cuda.is_current_stream_capturing():
            _kept_pools.append(self._pool)  # neither to be waited for nor to be freed now
            return
        torch.cuda.synchronize(self._device)
        with self._lock:
            self._pool = None
            self._native.reclaim_segments()


_kept_pools: list[torch.cuda.MemPool] = []


def memory_of(native: _native.Group, device: torch.device) -> HostMemory | DeviceMemory:
    return DeviceMemory(native, device) if device.type == "cuda" else HostMemory(native, device)

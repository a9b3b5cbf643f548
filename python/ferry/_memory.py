"""Where new tensors of a group come from: its symmetric memory, on the host or on a GPU."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
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
            self.empty(one.sizes, one.dtype) if one.moves else torch.empty(one.sizes, dtype=one.dtype) for one in wanted
        ]

    def close(self) -> None: ...


@functools.cache
def _segment_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """Lives as long as the process: torch gives memory back through it to the end."""
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, "ferry_segment_alloc", "ferry_segment_free")


class DeviceMemory:
    """Of a CUDA group: torch's caching allocator over segments of symmetric memory."""

    def __init__(self, native: _native.Group, device: torch.device) -> None:
        self._native = native
        self._device = device
        with torch.cuda.device(device):
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(_segment_allocator().allocator())

    def stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    @contextlib.contextmanager
    def _symmetric(self):
        with torch.cuda.use_mem_pool(self._pool, self._device):
            self._native.enter_pool()
            try:
                yield
            finally:
                self._native.leave_pool()

    def _make(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [torch.empty(one.sizes, dtype=one.dtype, device=self._device) for one in wanted]

    def _make_symmetric(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        try:
            with self._symmetric():
                return self._make(wanted)
        except torch.OutOfMemoryError:
            if self._native.num_resting_segments() == 0:
                self._native.raise_pool_error()
                raise
        # Segments that torch gave back may be all that is missing, but kernels may still use them.
        torch.cuda.synchronize(self._device)
        self._native.reclaim_segments()
        try:
            with self._symmetric():
                return self._make(wanted)
        except torch.OutOfMemoryError:
            self._native.raise_pool_error()
            raise

    def empty(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return self._make_symmetric([Wanted(sizes, dtype)])[0]

    def outputs(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        # A graph's replays use the memory of its capture, which only torch's pool for that graph keeps for them.
        if torch.cuda.is_current_stream_capturing():
            return self._make(wanted)
        return self._make_symmetric(wanted)

    def close(self) -> None:
        """Before the group ends: no kernel uses its memory any more."""
        if self._pool is None or sys.is_finalizing():
            return
        torch.cuda.synchronize(self._device)
        self._pool = None
        self._native.reclaim_segments()


def memory_of(native: _native.Group, device: torch.device) -> HostMemory | DeviceMemory:
    return DeviceMemory(native, device) if device.type == "cuda" else HostMemory(native, device)

"""Memory of a group's new tensors: symmetric memory, on the host or on a GPU."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ferry import _native
from ferry._tensors import tensor_of

Sizes = tuple[int, ...]


class Wanted:
    """A tensor that a call has to allocate. ``moves``: holds payload rows, which gain from symmetric memory."""

    __slots__ = ("dtype", "moves", "sizes")

    def __init__(self, sizes: Sizes, dtype: torch.dtype, moves: bool = False) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.moves = moves


Function = Callable[..., Any] | None


class TorchFunctions(NamedTuple):
    """Functions of torch by which the native module makes tensors and queries streams. They cost far less than
    ``torch.empty`` and the context managers, which replace any function that this torch does not have.
    """

    empty_strided: Function = None
    """(sizes, strides, dtype), on the current device: what torch's own compiled programs allocate with."""
    reinterpret: Function = None
    """(tensor, sizes, strides, offset): a view."""
    is_capturing: Function = None
    begin_pool: Function = None
    """(device, pool): tensors of this thread come from the pool until ``end_pool``, followed by ``release_pool``."""
    end_pool: Function = None
    release_pool: Function = None


def _functions_of(device: torch.device) -> TorchFunctions:
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    empty_strided = getattr(guards, f"_empty_strided_{device.type}", None)
    reinterpret = getattr(guards, "_reinterpret_tensor", None)
    if device.type != "cuda":
        return TorchFunctions(empty_strided, reinterpret)
    return TorchFunctions(
        empty_strided,
        reinterpret,
        getattr(torch._C, "_cuda_isCurrentStreamCapturing", None),
        getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None),
        getattr(torch._C, "_cuda_endAllocateToPool", None),
        getattr(torch._C, "_cuda_releasePool", None),
    )


class Memory:
    """Interface of either memory to the native module's calls."""

    pool_id: tuple[int, int] | None = None
    """Id of the pool of torch's allocator that gives symmetric memory now; None: there is none."""

    def __init__(self, native: _native.Group, device: torch.device) -> None:
        self._native = native
        self._device = device

    def torch_functions(self) -> TorchFunctions:
        return _functions_of(self._device)

    def plain(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=self._device)

    def outputs(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        raise NotImplementedError

    def outputs_of(self, asked: Sequence[tuple[Sizes, torch.dtype, bool]]) -> list[torch.Tensor]:
        """``outputs`` for tuples of (sizes, dtype, whether it moves)."""
        return self.outputs([Wanted(*one) for one in asked])


class HostMemory(Memory):
    """Memory of a CPU group."""

    def stream(self) -> int:
        """The handle of the stream that calls use."""
        return 0

    def empty(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in symmetric memory."""
        num_bytes = math.prod(sizes) * dtype.itemsize
        if num_bytes <= 0:
            return torch.empty(sizes, dtype=dtype, device=self._device)
        return tensor_of(self._native.allocate(num_bytes).array()).view(dtype).view(sizes)

    def outputs(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """The outputs of dispatch. On a CPU only payload is symmetric: allocating it is slow if ranks are processes."""
        return [
            self.empty(one.sizes, one.dtype)
            if one.moves
            else torch.empty(one.sizes, dtype=one.dtype, device=self._device)
            for one in wanted
        ]

    def close(self) -> None: ...


@functools.cache
def _segment_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """Lives as long as the process: torch frees memory through it until the end."""
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, "ferry_segment_alloc", "ferry_segment_free")


# The function that kernel compilers use: creating a stream object in each call would take longer than the rest.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream_of(device: torch.device) -> int:
    """The handle of the current stream of a GPU."""
    if _raw_stream is not None:
        return _raw_stream(device.index)
    return torch.cuda.current_stream(device).cuda_stream


class DeviceMemory(Memory):
    """Memory of a CUDA group: torch's caching allocator over segments of symmetric memory."""

    def __init__(self, native: _native.Group, device: torch.device) -> None:
        super().__init__(native, device)
        self._lock = threading.RLock()  # torch lets one thread at a time use a pool
        self._pool: torch.cuda.MemPool | None = None
        self._take_pool(self._new_pool())

    def _new_pool(self) -> torch.cuda.MemPool:
        with torch.cuda.device(self._device):
            return torch.cuda.MemPool(_segment_allocator().allocator())

    def _take_pool(self, pool: torch.cuda.MemPool | None) -> None:
        self.pool_id = None if pool is None else pool.id
        self._pool = pool

    def stream(self) -> int:
        return current_stream_of(self._device)

    def _make(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [torch.empty(one.sizes, dtype=one.dtype, device=self._device) for one in wanted]

    def _make_symmetric(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        with self._lock:
            if self._pool is None:  # the group was destroyed: the call itself reports it
                return self._make(wanted)
            with torch.cuda.use_mem_pool(self._pool, self._device.index):  # an index is faster than a device object
                self._native.enter_pool()
                try:
                    return self._make(wanted)
                finally:
                    self._native.leave_pool()

    def _free_unused(self) -> None:
        """Frees memory that torch caches, both GPU memory and the group's own. Waits for the GPU.

        torch frees a pool's unused segments with the pool. Segments that hold tensors stay.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._take_pool(self._new_pool())
        self._native.reclaim_segments()

    def _symmetric(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        try:
            return self._make_symmetric(wanted)
        except torch.OutOfMemoryError:
            with self._lock:
                if self._pool is None:
                    raise
                self._free_unused()
        return self._make_symmetric(wanted)

    def empty(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        try:
            return self._symmetric([Wanted(sizes, dtype)])[0]
        except torch.OutOfMemoryError:
            self._native.raise_pool_error()  # the more specific error if the arena is full
            raise

    def outputs(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        if not wanted:
            return []
        # A graph's replays use the memory of its capture, which only torch's pool for that graph keeps alive.
        if torch.cuda.is_current_stream_capturing():
            return self._make(wanted)
        try:
            return self._symmetric(wanted)
        except torch.OutOfMemoryError:
            return self._make(wanted)  # slower, but correct

    def close(self) -> None:
        """The group makes no more calls. Waits for the GPU, whose kernels may use the memory that is freed."""
        if self._pool is None or sys.is_finalizing():
            return
        if torch.cuda.is_current_stream_capturing():
            _kept_pools.append(self._pool)  # can be neither waited for nor freed during capture
            self.pool_id = None
            return
        torch.cuda.synchronize(self._device)
        with self._lock:
            self._take_pool(None)
            self._native.reclaim_segments()


_kept_pools: list[torch.cuda.MemPool] = []


def memory_of(native: _native.Group, device: torch.device) -> HostMemory | DeviceMemory:
    return DeviceMemory(native, device) if device.type == "cuda" else HostMemory(native, device)

"""Symmetric memory for torch's allocator: through the C functions that torch calls, on a CPU group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch.distributed as dist
from ranks import run_ranks

import ferry
from ferry import _native

MIB = 1 << 20


def functions() -> tuple[Callable[..., int | None], Callable[..., None]]:
    library = ctypes.CDLL(_native.__file__)
    library.ferry_segment_alloc.restype = ctypes.c_void_p
    library.ferry_segment_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.ferry_segment_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return (
        lambda num_bytes: library.ferry_segment_alloc(num_bytes, 0, None),
        lambda data: library.ferry_segment_free(data, 0, 0, None),
    )


def check(rank: int) -> None:
    group = ferry.Group(dist.group.WORLD, device="cpu", arena_bytes=64 * MIB)
    native = group._native
    allocate, free = functions()

    def held() -> int:
        return native.memory_usage()[2]

    assert allocate(MIB) is None, "only while a pool is entered"
    before = held()
    native.enter_pool()
    taken, growths = [], 0
    for _ in range(16):
        last = held()
        taken.append(allocate(MIB))
        ctypes.memset(taken[-1], len(taken), MIB)
        growths += held() > last
    assert len(set(taken)) == 16 and held() == before + 16 * MIB
    assert growths == 5, "1, 1, 2, 4 and 8 MiB: each step as large as what is held"
    assert all(ctypes.string_at(data, MIB) == bytes([i + 1]) * MIB for i, data in enumerate(taken))

    # Memory that torch frees is kept until the GPU is known to be idle; then it serves other segments.
    free(taken[9])
    free(taken[10])
    assert allocate(2 * MIB) not in (taken[9], taken[10])
    native.reclaim_segments()
    assert allocate(2 * MIB) == min(taken[9], taken[10])

    # Where a whole step does not fit, the segment alone is taken; where that does not fit either, there is an error.
    most = held()
    assert allocate(20 * MIB) is not None
    assert held() >= most + 20 * MIB
    assert allocate(60 * MIB) is None
    native.leave_pool()
    group.destroy()


def test_grows_in_large_steps_and_gives_back() -> None:
    run_ranks(1, check)


def check_end(rank: int) -> None:
    group = ferry.Group(dist.group.WORLD, device="cpu")
    allocate, free = functions()
    native = group._native
    before = native.memory_usage()[2]
    native.enter_pool()
    segments = [allocate(MIB) for _ in range(8)]
    native.leave_pool()
    for data in segments[:7]:
        free(data)
    native.reclaim_segments()
    assert native.memory_usage()[2] > before, "its chunk holds a segment"
    kept = segments[7]
    ctypes.memset(kept, 7, MIB)
    group.destroy()
    del group, native
    assert ctypes.string_at(kept, MIB) == b"\7" * MIB, "segments outlive their group"
    free(kept)


def test_segments_outlive_their_group() -> None:
    run_ranks(1, check_end)

"""A Mixture-of-Experts layer in JAX, jitted whole: dispatch and combine are XLA FFI handlers over the C interface.

    pip install jax
    python examples/17_jax.py             # compiles 17_jax_ffi.cpp and runs two ranks on this machine

The compiler needs to know where Ferry is: what `pkg-config --cflags --libs ferry` says, unless FERRY_FLAGS says it.
Buffers are in host memory (JAX on CPUs).
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

NUM_RANKS, NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 2, 16, 64, 2, 6
CAPACITY = NUM_RANKS * NUM_TOKENS  # rows of one expert: all tokens of all ranks may pick it


def build(folder: str) -> str:
    """Compiles the handlers; returns the library's path."""
    flags = os.environ.get("FERRY_FLAGS") or subprocess.check_output(
        ["pkg-config", "--cflags", "--libs", "ferry"], text=True
    )
    library = f"{folder}/libferry_jax.so"
    source = str(pathlib.Path(__file__).with_name("17_jax_ffi.cpp"))
    compiler = os.environ.get("CXX", "c++")
    xla = ["-isystem", jax.ffi.include_dir()]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", *xla, source, "-o", library, *shlex.split(flags)]
    subprocess.run(command, check=True)
    return library


def make_layer(group: int, num_local_experts: int):
    """The layer of one rank, jitted."""

    def layer(x, topk_idx, topk_weights, experts):
        dispatch = jax.ffi.ffi_call(
            "ferry_jax_dispatch",
            (
                jax.ShapeDtypeStruct((num_local_experts, CAPACITY, HIDDEN), jnp.float32),
                jax.ShapeDtypeStruct((8,), jnp.uint8),
            ),
            has_side_effect=True,
        )
        slab, routing = dispatch(x, topk_idx, topk_weights, group=np.int64(group), num_experts=np.int64(NUM_EXPERTS))
        slab = jnp.tanh(jnp.einsum("lch,lhk->lck", slab, experts))
        combine = jax.ffi.ffi_call(
            "ferry_jax_combine", jax.ShapeDtypeStruct(x.shape, jnp.float32), has_side_effect=True
        )
        return combine(slab, routing, group=np.int64(group))

    return jax.jit(layer)


def run_rank(path: str) -> None:
    library = ctypes.CDLL(path)
    library.ferry_jax_open.restype = ctypes.c_int64
    library.ferry_jax_close.argtypes = [ctypes.c_int64]
    for name in ("ferry_jax_dispatch", "ferry_jax_combine"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    group = library.ferry_jax_open()
    if group == 0:
        sys.exit(2)

    rank = int(os.environ["FERRY_RANK"])
    num_local_experts = NUM_EXPERTS // NUM_RANKS
    experts = jax.random.normal(jax.random.key(0), (NUM_EXPERTS, HIDDEN, HIDDEN)) / HIDDEN**0.5  # the same everywhere
    x_key, id_key = jax.random.split(jax.random.key(1 + rank))
    x = jax.random.normal(x_key, (NUM_TOKENS, HIDDEN))
    topk_weights, topk_idx = jax.lax.top_k(jax.random.uniform(id_key, (NUM_TOKENS, NUM_EXPERTS)), NUM_TOPK)
    layer = make_layer(group, num_local_experts)
    mine = experts[rank * num_local_experts : (rank + 1) * num_local_experts]
    for _ in range(3):
        out = layer(x, topk_idx.astype(jnp.int32), topk_weights, mine).block_until_ready()
    library.ferry_jax_close(group)

    every = jnp.tanh(jnp.einsum("th,ehk->tek", x, experts))
    dense = jnp.einsum("tk,tkh->th", topk_weights, jnp.take_along_axis(every, topk_idx[:, :, None], axis=1))
    difference = float(jnp.abs(out - dense).max())
    print(f"rank {rank}: largest difference from the dense layer {difference:.1e}")
    # Products of 64 numbers, added up in another order: some roundings of 2^-24 each.
    sys.exit(0 if difference < 1e-5 else 1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    if len(sys.argv) > 1:
        run_rank(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        common = {"FERRY_NUM_RANKS": NUM_RANKS, "FERRY_PORT": free_port(), "FERRY_SECRET": secrets.token_hex(16)}
        ranks = []
        for rank in range(NUM_RANKS):
            variables = {name: str(value) for name, value in {**common, "FERRY_RANK": rank}.items()}
            ranks.append(subprocess.Popen([sys.executable, __file__, library], env={**os.environ, **variables}))
        codes = [process.wait() for process in ranks]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

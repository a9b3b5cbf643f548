"""A Mixture-of-Experts layer in JAX, jitted whole: dispatch and combine are XLA FFI handlers over the C interface.

    pip install jax
    python examples/17_jax.py             # compiles 17_jax_ffi.cpp and runs two ranks on this machine

The compiler finds Ferry by the flags of `pkg-config --cflags --libs ferry`, or of FERRY_FLAGS if that is set.
Where JAX has GPUs, each rank takes one and the handlers work on device buffers, on XLA's stream; else buffers are in
host memory. Two ranks may share a GPU, but their kernels wait for each other: one GPU each is better.
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


def make_layer(rank: int, num_local_experts: int):
    """The layer of one rank, jitted; `rank` is the handle of the library."""
    names = {"rank": np.int64(rank), "layer": np.int64(0)}

    def layer(x, topk_idx, topk_weights, experts):
        slab_shape = jax.ShapeDtypeStruct((num_local_experts, CAPACITY, HIDDEN), jnp.float32)
        dispatch = jax.ffi.ffi_call("ferry_jax_dispatch", slab_shape, has_side_effect=True)
        slab = dispatch(x, topk_idx, topk_weights, num_experts=np.int64(NUM_EXPERTS), **names)
        slab = jnp.tanh(jnp.einsum("lch,lhk->lck", slab, experts))
        out_shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        combine = jax.ffi.ffi_call("ferry_jax_combine", out_shape, has_side_effect=True)
        return combine(slab, **names)

    return jax.jit(layer)


def run_rank(path: str) -> None:
    library = ctypes.CDLL(path)
    library.ferry_jax_open.restype = ctypes.c_int64
    library.ferry_jax_close.argtypes = [ctypes.c_int64]
    for name in ("ferry_jax_dispatch", "ferry_jax_combine"):
        for platform in ("cpu", "CUDA"):
            handler = getattr(library, f"{name}_{platform.lower()}")
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform)
    rank = int(os.environ["FERRY_RANK"])
    on_gpus = jax.default_backend() == "gpu"
    device = rank % jax.local_device_count()
    jax.config.update("jax_default_device", jax.local_devices()[device])
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round the factors to fewer bits
    handle = library.ferry_jax_open(b"cuda" if on_gpus else b"cpu", device)
    if handle == 0:
        sys.exit(2)

    num_local_experts = NUM_EXPERTS // NUM_RANKS
    experts = jax.random.normal(jax.random.key(0), (NUM_EXPERTS, HIDDEN, HIDDEN)) / HIDDEN**0.5  # the same everywhere
    x_key, id_key = jax.random.split(jax.random.key(1 + rank))
    x = jax.random.normal(x_key, (NUM_TOKENS, HIDDEN))
    topk_weights, topk_idx = jax.lax.top_k(jax.random.uniform(id_key, (NUM_TOKENS, NUM_EXPERTS)), NUM_TOPK)
    layer = make_layer(handle, num_local_experts)
    mine = experts[rank * num_local_experts : (rank + 1) * num_local_experts]
    for _ in range(3):
        out = layer(x, topk_idx.astype(jnp.int32), topk_weights, mine).block_until_ready()
    if library.ferry_jax_close(handle) != 0:
        sys.exit(2)

    every = jnp.tanh(jnp.einsum("th,ehk->tek", x, experts))
    dense = jnp.einsum("tk,tkh->th", topk_weights, jnp.take_along_axis(every, topk_idx[:, :, None], axis=1))
    difference = float(jnp.abs(out - dense).max())
    where = jax.local_devices()[device].device_kind
    print(f"rank {rank} on {where}: largest difference from the dense layer {difference:.1e}")
    # Products of 64 numbers, added in another order: some roundings of 2^-24 each.
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
        common = {
            "FERRY_NUM_RANKS": NUM_RANKS,
            "FERRY_PORT": free_port(),
            "FERRY_SECRET": secrets.token_hex(16),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # leaves the GPUs' memory to the other rank and to Ferry
        }
        ranks = []
        for rank in range(NUM_RANKS):
            variables = {name: str(value) for name, value in {**common, "FERRY_RANK": rank}.items()}
            ranks.append(subprocess.Popen([sys.executable, __file__, library], env={**os.environ, **variables}))
        codes = [process.wait() for process in ranks]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

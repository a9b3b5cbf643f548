#!/usr/bin/env python3
"""A Mixture-of-Experts layer in Python that uses only Ferry's shared library: ctypes_layer.py libferry.so

Two ranks are threads; ctypes releases the interpreter lock while they wait for each other. Every number is small, so
that sums are exact.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p, cast, sizeof

NUM_RANKS, NUM_TOKENS, HIDDEN, TOPK, NUM_EXPERTS = 2, 6, 8, 2, 5
INT64, FLOAT32, LAYOUT_EXPERTS, INVALID_ARGUMENT = 2, 3, 1, 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("num_dims", c_int32),
        ("shape", c_int64 * 3),
        ("strides", c_int64 * 3),
    ]


class Versioned(ctypes.Structure):
    """Sets struct_size; all other members are zero unless given."""

    def __init__(self, **values: object) -> None:
        super().__init__(struct_size=sizeof(self), **values)


class GroupOptions(Versioned):
    _fields_ = [
        ("struct_size", c_uint64),
        ("backend", c_char_p),
        ("transport", c_char_p),
        ("ring_memory", c_char_p),
        ("net_devices", c_char_p),
        ("tuning_file", c_char_p),
        ("arena_bytes", c_uint64),
        ("timeout_ns", c_int64),
        ("latency_bytes", c_uint64),
        ("mask_timeout_ns", c_int64),
        ("ranks_per_node", c_int32),
        ("mask_lost_ranks", c_int32),
        ("use_device", c_int32),
        ("device", c_int32),
        ("interrupted", c_void_p),
        ("interrupted_user", c_void_p),
        ("num_reserved_sms", c_int32),
        ("verify", c_int32),
        ("network_poll_ns", c_int64),
        ("network_service_level", c_int32),
        ("network_paths", c_int32),
        ("present_ranks", POINTER(c_int32)),
        ("num_present_ranks", c_int32),
        ("num_ranks", c_int32),
    ]


class RouteInput(Versioned):
    _fields_ = [("struct_size", c_uint64), ("topk_idx", Tensor), ("topk_weights", Tensor)]


class RouteOptions(Versioned):
    _fields_ = [
        ("struct_size", c_uint64),
        ("num_experts", c_int64),
        ("expert_alignment", c_int64),
        ("slab_capacity", c_int64),
        ("max_recv_rows", c_int64),
        ("max_tokens", c_int64),
        ("expert_to_rank", c_void_p),
        ("num_expert_to_rank", c_int64),
        ("layout", c_int32),
        ("num_sms", c_int32),
    ]


class DispatchInput(Versioned):
    _fields_ = [("struct_size", c_uint64), ("x", Tensor), ("scales", Tensor), ("topk_weights", Tensor)]


class DispatchOutput(Versioned):
    _fields_ = [
        ("struct_size", c_uint64),
        ("x", Tensor),
        ("scales", Tensor),
        ("topk_idx", Tensor),
        ("topk_weights", Tensor),
        ("source", Tensor),
    ]


class CombineInput(Versioned):
    _fields_ = [
        ("struct_size", c_uint64),
        ("x", Tensor),
        ("weights", Tensor),
        ("bias", Tensor * 2),
        ("topk_weights", Tensor),
    ]


class CombineOutput(Versioned):
    _fields_ = [("struct_size", c_uint64), ("x", Tensor), ("weights", Tensor)]


class CombineOptions(Versioned):
    _fields_ = [
        ("struct_size", c_uint64),
        ("weighted", c_int32),
        ("num_sms", c_int32),
        ("num_copy_sms", c_int32),
        ("chunk_tokens", c_int32),
        ("copy_path", c_int32),
        ("reserved", c_int32),
    ]


def load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    p = c_void_p
    status_calls = {
        "bootstrap_create_in_process": [c_int32, POINTER(p)],
        "group_create": [p, POINTER(GroupOptions), POINTER(p)],
        "group_destroy": [p],
        "route": [p, POINTER(RouteInput), POINTER(RouteOptions), p, POINTER(p)],
        "dispatch": [p, p, POINTER(DispatchInput), POINTER(DispatchOutput), p, p],
        "combine": [p, p, POINTER(CombineInput), POINTER(CombineOutput), POINTER(CombineOptions), p],
    }
    other_calls = {
        "status_code": (c_int32, [p]),
        "status_peer": (c_int32, [p]),
        "status_message": (c_char_p, [p]),
        "status_free": (None, [p]),
        "bootstrap_free": (None, [p]),
        "group_free": (None, [p]),
        "group_rank": (c_int32, [p]),
        "routing_free": (None, [p]),
        "routing_num_recv_rows": (c_int64, [p]),
        "routing_expert_row_offsets": (POINTER(c_int64), [p, POINTER(c_int64)]),
        "routing_local_expert_ids": (POINTER(c_int32), [p, POINTER(c_int64)]),
    }
    for name, arguments in status_calls.items():
        other_calls[name] = (p, arguments)
    for name, (result, arguments) in other_calls.items():
        function = getattr(library, f"ferry_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def matrix(memory: ctypes.Array, dtype: int, rows: int, columns: int) -> Tensor:
    return Tensor(cast(memory, c_void_p), dtype, 2, (rows, columns, 0))


class Rank:
    def __init__(self, library: ctypes.CDLL, bootstrap: c_void_p) -> None:
        self.library = library
        self.bootstrap = bootstrap
        self.right = False

    def require(self, status: int | None) -> None:
        if status is None:
            return
        message = self.library.ferry_status_message(status).decode()
        self.library.ferry_status_free(status)
        raise RuntimeError(message)

    def run(self) -> None:
        group = c_void_p()
        options = GroupOptions(backend=b"cpu", timeout_ns=60 * 10**9)
        self.require(self.library.ferry_group_create(self.bootstrap, byref(options), byref(group)))
        self.library.ferry_bootstrap_free(self.bootstrap)
        self.check_refusal(group)
        self.right = self.run_layer(group)
        self.require(self.library.ferry_group_destroy(group))
        self.library.ferry_group_free(group)

    def check_refusal(self, group: c_void_p) -> None:
        status = self.library.ferry_route(group, byref(RouteInput()), byref(RouteOptions()), None, byref(c_void_p()))
        assert self.library.ferry_status_code(status) == INVALID_ARGUMENT
        assert self.library.ferry_status_peer(status) >= 0
        assert b"route" in self.library.ferry_status_message(status)
        self.library.ferry_status_free(status)

    def run_layer(self, group: c_void_p) -> bool:
        rank = self.library.ferry_group_rank(group)
        x = (c_float * (NUM_TOKENS * HIDDEN))(*[(5 * i + rank) % 9 for i in range(NUM_TOKENS * HIDDEN)])
        ids = [(2 * i + i // TOPK + rank) % NUM_EXPERTS for i in range(NUM_TOKENS * TOPK)]
        weights = [0.25 * (i % 4) for i in range(NUM_TOKENS * TOPK)]
        topk_idx = (c_int64 * len(ids))(*ids)
        topk_weights = (c_float * len(weights))(*weights)
        choice = RouteInput(
            topk_idx=matrix(topk_idx, INT64, NUM_TOKENS, TOPK),
            topk_weights=matrix(topk_weights, FLOAT32, NUM_TOKENS, TOPK),
        )
        routing = c_void_p()
        options = RouteOptions(num_experts=NUM_EXPERTS, layout=LAYOUT_EXPERTS)
        self.require(self.library.ferry_route(group, byref(choice), byref(options), None, byref(routing)))

        num_rows = self.library.ferry_routing_num_recv_rows(routing)
        rows = (c_float * (num_rows * HIDDEN))()
        send = DispatchInput(x=matrix(x, FLOAT32, NUM_TOKENS, HIDDEN))
        receive = DispatchOutput(x=matrix(rows, FLOAT32, num_rows, HIDDEN))
        self.require(self.library.ferry_dispatch(group, routing, byref(send), byref(receive), None, None))

        num_local = c_int64()
        experts = self.library.ferry_routing_local_expert_ids(routing, byref(num_local))
        offsets = self.library.ferry_routing_expert_row_offsets(routing, None)
        for local in range(num_local.value):
            for i in range(offsets[local] * HIDDEN, offsets[local + 1] * HIDDEN):
                rows[i] *= experts[local] + 1

        out = (c_float * len(x))()
        results = CombineInput(x=matrix(rows, FLOAT32, num_rows, HIDDEN))
        sums = CombineOutput(x=matrix(out, FLOAT32, NUM_TOKENS, HIDDEN))
        weighted = CombineOptions(weighted=1)
        self.require(self.library.ferry_combine(group, routing, byref(results), byref(sums), byref(weighted), None))
        self.library.ferry_routing_free(routing)

        factors = [
            sum(weights[entry] * (ids[entry] + 1) for entry in range(token * TOPK, (token + 1) * TOPK))
            for token in range(NUM_TOKENS)
        ]
        return list(out) == [factors[i // HIDDEN] * x[i] for i in range(len(x))]


def main() -> int:
    library = load(sys.argv[1])
    bootstraps = (c_void_p * NUM_RANKS)()
    assert library.ferry_bootstrap_create_in_process(NUM_RANKS, bootstraps) is None
    ranks = [Rank(library, c_void_p(bootstrap)) for bootstrap in bootstraps]
    threads = [threading.Thread(target=rank.run) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(rank.right for rank in ranks):
        print("a rank failed, or its sums are wrong", file=sys.stderr)
        return 1
    print("ctypes_layer: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())

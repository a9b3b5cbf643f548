"""Types of the native module. It takes tensors or (address, dtype number, shape, strides), returns DLPack arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_View = torch.Tensor | tuple[int, int, tuple[int, ...], tuple[int, ...]] | None
_Kernel = tuple[int, int, int]
_Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

class BadTensor(Exception):
    """A tensor that the module cannot read in place: nothing was done. Pass a tuple, after a look at what is wrong."""

class Bootstrap: ...

class Buffer:
    def array(self) -> object: ...

class Routing:
    def __init__(self) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_topk(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def layout(self) -> int: ...
    @property
    def num_recv_rows(self) -> int: ...
    @property
    def num_used_rows(self) -> int: ...
    def may_repeat_experts(self) -> bool: ...
    def num_rows_per_local_expert(self) -> list[int]: ...
    def expert_row_offsets(self) -> list[int]: ...
    def num_rows_from_rank(self) -> list[int]: ...
    def num_rows_to_rank(self) -> list[int]: ...
    def local_expert_ids(self) -> list[int]: ...
    def source_ranges(self) -> object | None: ...
    def slots(self) -> object: ...
    def source(self) -> object: ...
    def topk_idx(self) -> object: ...
    def topk_weights(self) -> object | None: ...
    def num_recv_rows_view(self) -> object: ...
    def num_rows_per_local_expert_view(self) -> object: ...
    def num_rows_per_expert_view(self) -> object: ...
    @property
    def num_physical_experts(self) -> int: ...
    def expert_row_offsets_view(self) -> object: ...

class Calls:
    """Whole calls of a group on tensors. None: not a common case; nothing was done."""

    def route(
        self,
        owner: object,
        topk_idx: object,
        topk_weights: object,
        num_experts: object,
        layout: int,
        expert_alignment: object,
        slab_capacity: object,
        max_recv_rows: object,
        max_tokens: object,
        num_sms: object,
    ) -> Any: ...
    def dispatch(
        self,
        routing: Routing,
        x: object,
        scales: object,
        topk_weights: object,
        out: object,
        out_scales: object,
        out_source: object,
        tables: bool,
        has_weights: bool,
        bounded: bool,
        zero_padding: bool,
        num_sms: object,
        quantize: int = 0,
    ) -> Any: ...
    def combine(
        self,
        routing: Routing,
        x: object,
        weights: object,
        bias: object,
        weighted: bool,
        topk_weights: object,
        out: object,
        num_sms: object,
    ) -> Any: ...

class BufferCalls:
    """Calls of a deep_ep buffer that return what its methods do. None: not a common case; nothing was done."""

    def __init__(self, calls: Calls, group: object, types: tuple[type, ...], captured: list[Any]) -> None: ...
    def bound_of(self, num_sms: object) -> int | None: ...
    def layout(self, topk_idx: object, num_experts: object, ranks_per_node: int) -> Any: ...
    def dispatch(
        self,
        x: object,
        tokens_per_rank: object,
        token_in_rank: object,
        tokens_per_expert: object,
        topk_idx: object,
        topk_weights: object,
        alignment: object,
        most_rows: object,
        num_sms: object,
    ) -> Any: ...
    def dispatch_again(self, x: object, handle: object, num_sms: object) -> Any: ...
    def combine(self, x: object, handle: object, topk_weights: object, bias: object, num_sms: object) -> Any: ...
    def elastic_dispatch(
        self,
        x: object,
        topk_idx: object,
        topk_weights: object,
        expert_stats: object,
        num_experts: object,
        num_max_tokens: object,
        most_tokens: object,
        alignment: object,
        zero_padding: bool,
        column_major_scales: bool,
        copy_ids: bool,
        exact: bool,
        expand: bool,
        num_sms: object,
    ) -> Any: ...
    def elastic_dispatch_again(
        self,
        x: object,
        handle: object,
        topk_weights: object,
        zero_padding: bool,
        column_major_scales: bool,
        num_sms: object,
    ) -> Any: ...
    def elastic_combine(
        self, x: object, handle: object, topk_weights: object, bias: object, num_sms: object
    ) -> Any: ...
    def low_latency_dispatch(
        self,
        x: object,
        topk_idx: object,
        max_tokens: object,
        num_experts: object,
        expert_stats: object,
        wait_stats: object,
        sent: object,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> Any: ...
    def low_latency_combine(
        self,
        x: object,
        topk_idx: object,
        topk_weights: object,
        handle: object,
        out: object,
        wait_stats: object,
        sent: object,
    ) -> Any: ...

class Placement:
    def __init__(self, physical_to_logical: Sequence[int], physical_to_rank: Sequence[int], choice: int, /) -> None: ...

class Group:
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def backend(self) -> str: ...
    def allocate(self, num_bytes: int, /) -> Buffer: ...
    def memory_usage(self) -> tuple[int, int, int]: ...
    def trim(self) -> None: ...
    def wait_times_ns(self) -> list[int]: ...
    def network_usage(self) -> tuple[str, list[tuple[int, int, int, str]], str, str]: ...
    def route(
        self,
        topk_idx: _View,
        topk_weights: _View,
        num_experts: int,
        layout: int,
        expert_alignment: int,
        slab_capacity: int,
        max_recv_rows: int,
        max_tokens: int,
        num_sms: int,
        expert_to_rank: Sequence[int],
        stream: int,
        placement: Placement | None = None,
        table: _View = None,
        counters: tuple[_View, ...] | None = None,
    ) -> Routing: ...
    def dispatch(
        self,
        routing: Routing,
        inputs: tuple[_View, ...],
        outputs: tuple[_View, ...],
        stream: int,
        zero_padding: bool,
        kernel: _Kernel,
        quantize: int = 0,
    ) -> None: ...
    def combine(
        self,
        routing: Routing,
        inputs: tuple[_View, ...],
        outputs: tuple[_View, ...],
        stream: int,
        weighted: bool,
        kernel: _Kernel,
        /,
    ) -> None: ...
    def channel_tables(
        self, routing: Routing, num_channels: int, outputs: tuple[_View, ...], stream: int, /
    ) -> None: ...
    def latency_update_mask(self, rank: int, masked: bool, stream: int, /) -> None: ...
    def latency_query_mask(self, out: _View, stream: int, /) -> None: ...
    def latency_clear_mask(self, stream: int, /) -> None: ...
    def calls(self, memory: object, routing: type, received: type, combined: type, /) -> Calls: ...
    def wait(self, stream: int, /) -> None: ...
    def poll(self) -> None: ...
    def enter_pool(self) -> None: ...
    def leave_pool(self) -> None: ...
    def raise_pool_error(self) -> None: ...
    def reclaim_segments(self) -> None: ...
    def refuse_in_handler(self, operation: str) -> None: ...
    def destroy(self) -> None: ...

def latency_dispatch(
    calls: Calls,
    x: object,
    scales: object,
    tensors: tuple[object, object, object, object, object, object, object, object],
    num_experts: int,
    max_tokens: int,
    slab_capacity: int,
    expert_to_rank: Sequence[int],
    quantize: int,
    column_major_scales: bool,
    zero_padding: bool,
    kept: list[object] | None,
    num_sms: int,
    placement: Placement | None = None,
    table: _View = None,
    counters: tuple[_View, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Routing]: ...
def latency_combine(
    calls: Calls,
    routing: Routing,
    x: object,
    tensors: tuple[object, object, object, object],
    order: int,
    kept: list[object] | None,
    num_sms: int,
) -> torch.Tensor: ...
def latency_receive(calls: Calls, routing: Routing) -> None: ...
def latency_slab_tables(calls: Calls, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
def latency_bytes_required(
    backend: str,
    num_ranks: int,
    max_tokens: int,
    num_topk: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    order: int,
) -> int: ...

class Balance:
    def physical_to_logical(self) -> Any: ...
    def logical_to_physical(self) -> Any: ...
    def replica_counts(self) -> Any: ...
    @property
    def policy(self) -> str: ...
    @property
    def max_load(self) -> list[float]: ...
    @property
    def mean_load(self) -> list[float]: ...
    @property
    def num_moves(self) -> list[int]: ...

def balance(
    load: _View,
    previous: _View | None,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    policy: int,
    max_moves: int,
    move_weight: float,
    max_steps: int,
) -> Balance: ...
def plan_moves(
    previous: _View, next: _View, num_experts: int, num_ranks: int, num_nodes: int, /
) -> tuple[list[tuple[Any, ...]], list[int], int, int, int, list[int]]: ...
def describe_arrivals(
    calls: Calls,
    topk_idx: object,
    source: object,
    rows_per_expert: object,
    max_tokens: int,
    alignment: int,
    expands: bool,
) -> tuple[Any, Any, Any, Any, Any]: ...
def expand_received(
    calls: Calls,
    x: object,
    scales: object,
    weights: object,
    metadata: object,
    last_equal: object,
    num_rows: int,
    zero_padding: bool,
    column_major_scales: bool,
) -> tuple[Any, Any, Any]: ...
def reduce_sent(
    calls: Calls, x: object, weights: object, metadata: object, last_equal: object, exact: bool
) -> tuple[Any, Any]: ...
def dispatch_layout(
    topk_idx: _View,
    num_experts: int,
    num_ranks: int,
    ranks_per_node: int,
    outputs: tuple[_View, _View, _View, _View],
    device: int,
    stream: int,
    /,
) -> None: ...
def quantize(x: _View, q: _View, scales: _View, mode: int, device: int, stream: int) -> None: ...
def dequantize(q: _View, scales: _View, x: _View, device: int, stream: int) -> None: ...
def select_experts(
    logits: _View,
    bias: _View,
    topk_idx: _View,
    topk_weights: _View,
    options: tuple[Any, ...],
    device: int,
    stream: int,
) -> None: ...
def gating_presets() -> list[tuple[str, int, bool, str, tuple[Any, ...]]]: ...
def create_group(
    bootstrap: Bootstrap,
    backend: str,
    device: int,
    timeout_ns: int,
    arena_bytes: int,
    ranks_per_node: int,
    transport: str,
    ring_memory: str,
    net_devices: str,
    tuning_file: str,
    latency_bytes: int,
    mask_lost_ranks: bool,
    mask_timeout_ns: int,
    /,
) -> Group: ...
def callback_bootstrap(
    rank: int, num_ranks: int, gather: Callable[[bytes], list[bytes]], local_address: str, /
) -> Bootstrap: ...
def environment_bootstrap(timeout_ns: int, /) -> Bootstrap: ...
def version() -> str: ...
def commit() -> str: ...
def backends() -> list[tuple[str, bool, str]]: ...

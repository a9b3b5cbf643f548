"""Types of the native module. It takes torch tensors and other arguments of calls as programs pass them, and raises
ferry.InvalidArgument where one is wrong. Memory of the library is returned as DLPack arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    """Calls of a group. One that cannot be made is refused on all ranks, and raises."""

    def route(
        self,
        owner: object,
        topk_idx: object,
        topk_weights: object,
        num_experts: object,
        layout: object,
        expert_alignment: object,
        slab_capacity: object,
        max_recv_rows: object,
        max_tokens: object,
        num_sms: object,
        expert_to_rank: object,
        placement: object,
        counters: object,
    ) -> Any: ...
    def dispatch(
        self,
        owner: object,
        routing: object,
        x: object,
        scales: object,
        topk_weights: object,
        out: object,
        out_scales: object,
        out_source: object,
        tables: bool,
        zero_padding: bool,
        num_sms: object,
        quantize: object,
    ) -> Any: ...
    def combine(
        self,
        owner: object,
        routing: object,
        x: object,
        weights: object,
        bias: object,
        weighted: bool,
        topk_weights: object,
        out: object,
        num_sms: object,
        wire_format: object,
    ) -> Any: ...
    def refuse_route(self) -> None: ...
    def refuse_combine(self, owner: object, routing: object) -> None: ...
    def check_placement(self, placement: object, operation: str) -> None: ...

class BufferCalls:
    """Calls of a deep_ep buffer, with the results of its methods.

    problem: None, or an exception that is raised after the call was refused on all ranks. epilogue: an
    argument previous_event_before_epilogue. deferred: the call returns a DeferredCall that makes its last part and
    returns the results, the tensors that this part reads, and the event.
    """

    def __init__(
        self,
        calls: Calls,
        group: object,
        types: tuple[type, ...],
        steps: object,
        captured: list[Any],
        to_all: object,
        narrow_ids: bool,
    ) -> None: ...
    def bound_of(self, num_sms: object, operation: str) -> int: ...
    def layout(self, problem: Exception | None, topk_idx: object, num_experts: object, ranks_per_node: int) -> Any: ...
    def dispatch(
        self,
        problem: Exception | None,
        x: object,
        tokens_per_rank: object,
        tokens_per_node: object,
        token_in_rank: object,
        tokens_per_expert: object,
        topk_idx: object,
        topk_weights: object,
        alignment: object,
        most_rows: object,
        num_sms: object,
    ) -> Any: ...
    def dispatch_again(
        self,
        problem: Exception | None,
        x: object,
        handle: object,
        topk_idx: object,
        topk_weights: object,
        num_sms: object,
    ) -> Any: ...
    def combine(
        self,
        problem: Exception | None,
        x: object,
        handle: object,
        topk_weights: object,
        bias: object,
        num_sms: object,
    ) -> Any: ...
    def elastic_dispatch(
        self,
        problem: Exception | None,
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
        deferred: bool,
        epilogue: object,
        num_sms: object,
    ) -> Any: ...
    def elastic_dispatch_again(
        self,
        problem: Exception | None,
        x: object,
        handle: object,
        topk_weights: object,
        given: dict[str, Any] | None,
        zero_padding: bool,
        column_major_scales: bool,
        deferred: bool,
        epilogue: object,
        num_sms: object,
    ) -> Any: ...
    def elastic_combine(
        self,
        problem: Exception | None,
        x: object,
        handle: object,
        topk_weights: object,
        bias: object,
        single_rounding: bool,
        deferred: bool,
        epilogue: object,
        num_sms: object,
    ) -> Any: ...
    def low_latency_dispatch(
        self,
        problem: Exception | None,
        x: object,
        topk_idx: object,
        max_tokens: object,
        num_experts: object,
        expert_stats: object,
        wait_stats: object,
        hook: object,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> Any: ...
    def low_latency_combine(
        self,
        problem: Exception | None,
        x: object,
        topk_idx: object,
        topk_weights: object,
        handle: object,
        out: object,
        wait_stats: object,
        zero_copy: bool,
        hook: object,
        overlap: object,
    ) -> Any: ...
    def received_on(self, stream: int) -> None: ...
    def check_latency_shape(self, max_tokens: object, hidden: object, num_experts: object, operation: str) -> None: ...
    def slab_of(self, handle: object, operation: str) -> tuple[Any, tuple[int, int, int]]: ...

class DeferredCall:
    """The last part of a call; called once."""

    def __call__(self) -> tuple[Any, ...]: ...

class Placement:
    def __init__(
        self, physical_to_logical: Sequence[int], physical_to_rank: Sequence[int], choice: int, allow_homeless: bool, /
    ) -> None: ...
    def surviving(
        self, num_experts: int, num_ranks: int, kept_ranks: Sequence[int], /
    ) -> tuple[list[int], list[int], int]: ...

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
    def network_usage(self) -> tuple[str, list[tuple[int, int, int, str]], str, str, int, int, str]: ...
    def channel_tables(
        self, routing: Routing, num_channels: int, outputs: tuple[torch.Tensor, ...], stream: int, /
    ) -> None: ...
    def latency_update_mask(self, rank: object, masked: bool, stream: int) -> None: ...
    def latency_query_mask(self, out: object, stream: int, /) -> None: ...
    def latency_clear_mask(self, stream: int, /) -> None: ...
    def suspend(self) -> tuple[int, ...]: ...
    def renew(self, bootstrap: Bootstrap, present_ranks: list[int], /) -> None: ...
    def calls(self, memory: object, classes: tuple[type, ...], /) -> Calls: ...
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
    topk_idx: object,
    topk_weights: object,
    out: object,
    out_scales: object,
    num_tokens: object,
    wait_times_ns: object,
    num_experts: object,
    max_tokens: object,
    slab_capacity: object,
    expert_to_rank: object,
    quantize: object,
    column_major_scales: bool,
    zero_padding: bool,
    sent: object,
    num_sms: object,
    placement: object,
    counters: object,
) -> tuple[torch.Tensor, torch.Tensor | None, Routing]: ...
def latency_combine(
    calls: Calls,
    owner: object,
    routing: object,
    x: object,
    topk_weights: object,
    out: object,
    wait_times_ns: object,
    order: object,
    sent: object,
    num_sms: object,
    wire_format: object,
    signals: object,
) -> torch.Tensor: ...
def latency_receive(calls: Calls, routing: Routing, stream: int | None) -> None: ...
def latency_bytes_required(
    backend: str,
    num_ranks: object,
    max_tokens: object,
    num_topk: object,
    dispatch_row_bytes: object,
    combine_row_bytes: object,
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
    load: object,
    previous: object,
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
    previous: object, next: object, num_experts: int, num_ranks: int, num_nodes: int
) -> tuple[list[tuple[Any, ...]], list[int], int, int, int, list[int]]: ...
def dispatch_layout(
    topk_idx: object,
    num_experts: int,
    num_ranks: int,
    ranks_per_node: int,
    outputs: tuple[torch.Tensor, ...],
    device: int,
    stream: int,
    /,
) -> None: ...
def quantize(x: object, q: object, scales: object, mode: int, device: int, stream: int) -> None: ...
def dequantize(q: object, scales: object, x: object, device: int, stream: int) -> None: ...
def select_experts(
    logits: object,
    bias: object,
    topk_idx: object,
    topk_weights: object,
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
    num_reserved_sms: int,
    network_poll_ns: int,
    network_service_level: int,
    network_paths: int,
    num_ranks: int,
    present_ranks: list[int],
    verify: bool,
    /,
) -> Group: ...
def callback_bootstrap(
    rank: int, num_ranks: int, gather: Callable[[bytes], list[bytes]], local_address: str, /
) -> Bootstrap: ...
def environment_bootstrap(timeout_ns: int, /) -> Bootstrap: ...

class Membership:
    """Members of a program, and the views that they agree on. View: the fields of ferry.MembershipView."""

    @property
    def address(self) -> str: ...
    def first_view(self) -> tuple[Any, ...]: ...
    def complete_steps(self, num_steps: int, /) -> None: ...
    def num_waiting(self) -> int: ...
    def num_awaiting(self) -> int: ...
    def next_view(self, late_rank: int | None, silent_ids: list[int], leave: bool) -> tuple[Any, ...]: ...
    def bootstrap(self) -> Bootstrap: ...

def create_membership(bootstrap: Bootstrap, secret: str, host: str, timeout_ns: int, /) -> Membership: ...
def join_membership(
    contacts: list[str], secret: str, id: int, host: str, admission_timeout_ns: int, timeout_ns: int, /
) -> Membership: ...
def version() -> str: ...
def commit() -> str: ...
def backends() -> list[tuple[str, bool, str]]: ...

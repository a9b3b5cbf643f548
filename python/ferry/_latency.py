"""Latency mode: dispatch and combine of the small batches of decoding, whole or in two halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ferry import _native
from ferry._eager import eager
from ferry._errors import InvalidArgument
from ferry._placement import LoadCounters, Placement
from ferry._quantize import Quantization, WireFormat
from ferry._routing import Routing

CombineOrder = Literal["exact", "rank_sums"]

_ORDERS: tuple[CombineOrder, ...] = ("exact", "rank_sums")  # of ferry::CombineOrder


@dataclasses.dataclass(frozen=True)
class TileSignals:
    """Words by which the computation of a combine's rows reports tiles of them as finished, so that
    :meth:`Group.latency_combine` may begin while it still runs.

    Whoever computes rows of a tile stores them, and then adds to the tile's word with release semantics: in Triton
    ``tl.debug_barrier()`` and ``tl.atomic_add(word, 1, sem="release")``, in CUDA after a barrier of the block
    ``__threadfence()`` and ``atomicAdd``. The combine reads rows of a tile only after that. Zero the words before the
    computation begins, on GPUs in stream order before both kernels, and before each replay of a graph. On a GPU, launch
    the computation on another stream right before the combine, which gets few multiprocessors (``num_sms``).
    Only tiles that hold a received row are waited for; :class:`Timeout` is raised if one does not finish.
    """

    words: torch.Tensor
    """[L, ceil(C / tile_rows)] i32, contiguous, on the group's device: for tile t of local expert l, which is its rows
    t * tile_rows to (t + 1) * tile_rows - 1."""
    tile_rows: int
    """Rows of a tile, at least 1."""
    threshold: int
    """At least 1: a tile is finished once its word is at least this."""


class Sent:
    """A split call between its halves, created before the send half. Its group keeps the tensors that the call reads or
    writes until it is received, or, if it never is, until the next call that all ranks make together.
    """

    __slots__ = ("_group", "_is_open", "_native", "_number", "_operation", "kept", "stream")

    def __init__(self, operation: str, group: LatencyCalls, *tensors: object) -> None:
        self._operation = operation
        self._group = group
        self._native: _native.Routing | None = None
        self._is_open = True
        self.kept = list(tensors)
        """The tensors of the call; the native module adds those that it makes."""
        self.stream: int | None = None
        """Handle of the stream to receive on; None: the one that is current then."""
        self._number = group._in_flight.add(self.kept)

    def sent_with(self, native: _native.Routing) -> None:
        """Records that the send half was made."""
        self._native = native

    def forget(self) -> None:
        """Nothing was sent."""
        self._is_open = False
        self._group._in_flight.forget(self._number)

    def receive(self) -> None:
        if not self._is_open:
            raise InvalidArgument(f"{self._operation}: the call was received before; receive each split call once")
        self._group._native.refuse_in_handler("latency_receive")
        try:
            _native.latency_receive(self._group._calls, self._native, self.stream)
        finally:
            self._is_open = False
            self._group._in_flight.received(self._number)

    def __del__(self) -> None:
        if self._is_open:
            self._group._in_flight.dropped(self._number)


class InFlight:
    """The tensors of split calls that are sent and not received.

    On CPUs rows move later than the call is made: a call that the program has dropped, for example because of an
    exception between its halves, is made with the next one that all ranks make together, and needs its tensors then.
    """

    def __init__(self) -> None:
        self._next = 0
        self._tensors: dict[int, Sequence[object]] = {}
        self.calls_dropped: list[int] = []
        """Numbers of calls that are sent and will not be received."""

    def add(self, tensors: Sequence[object]) -> int:
        number = self._next
        self._next = number + 1
        self._tensors[number] = tensors
        return number

    def forget(self, number: int) -> None:
        """Nothing was sent."""
        self._tensors.pop(number, None)

    def dropped(self, number: int) -> None:
        self.calls_dropped.append(number)

    def received(self, number: int) -> None:
        """Records that this call has been made, and with it those that were sent before."""
        self._tensors.pop(number, None)
        if self.calls_dropped:
            self._forget_before(number)

    def made_whole(self) -> None:
        """Records that a call of either mode that was not split has been made, and with it all that were sent
        before.
        """
        if self.calls_dropped:
            self._forget_before(self._next)

    def _forget_before(self, before: int) -> None:
        made = [number for number in self.calls_dropped if number < before]
        for number in made:
            self.calls_dropped.remove(number)
            self._tensors.pop(number, None)

    def clear(self) -> None:
        self._tensors.clear()


class _Result:
    __slots__ = ("_sent",)
    _sent: Sent | None

    def receive(self) -> None:
        """The receive half of a split call: ``x`` is complete when it returns, on a GPU for later work on the current
        stream, which may be another than the call's. Raises InvalidArgument unless the call was split, and the second
        time. The bound method may be passed on as a hook.
        """
        if self._sent is None:
            raise InvalidArgument("receive: the call was not split, so it has received; pass split=True to the call")
        self._sent.receive()


class LatencyDispatched(_Result):
    """The result of :meth:`Group.latency_dispatch`. Of a split call it is complete when received."""

    __slots__ = ("routing", "scales", "x")

    def __init__(
        self, x: torch.Tensor, scales: torch.Tensor | None, routing: Routing[LatencyCalls], sent: Sent | None
    ) -> None:
        self.x = x
        """[L, C, H]: rows of each local expert, by source rank, then token; dtype of the payload, or quantised."""
        self.scales = scales
        """[L, C, S]; None if none were sent or made."""
        self.routing = routing
        """Routing for the combine. ``local_expert_counts``, ``source_ranges`` and ``source`` describe the rows."""
        self._sent = sent


class LatencyCombined(_Result):
    """The result of :meth:`Group.latency_combine`. Of a split call it is complete when received."""

    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor, sent: Sent | None) -> None:
        self.x = x
        """[T, H]: the weighted sums of this rank's tokens, dtype of the rows."""
        self._sent = sent


class LatencyCalls:
    """The calls of :class:`ferry.Group` in latency mode."""

    _calls: _native.Calls
    _in_flight: InFlight
    _memory: Any
    _native: _native.Group
    device: torch.device
    num_ranks: int

    @eager
    def latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_experts: int,
        max_tokens: int,
        slab_capacity: int | None = None,
        scales: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        quantize: Quantization | None = None,
        column_major_scales: bool = False,
        zero_padding: bool = False,
        split: bool = False,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
        expert_to_rank: Sequence[int] | None = None,
        placement: Placement | None = None,
        counters: LoadCounters | None = None,
        wait_times_ns: torch.Tensor | None = None,
        num_sms: int = 0,
    ) -> LatencyDispatched:
        """Route a small batch and send it in one call, into C rows for each local expert. Collective.

        The rows are those of a route with layout "slab" and a dispatch, bit for bit, but no rank waits for counts.

        x: [T, H] of any dtype whose rows are whole multiples of 16 bytes; bf16 with ``quantize``.
        topk_idx: [T, K] i32 or i64, contiguous: global expert ids, -1 for none; duplicates are allowed.
        topk_weights: [T, K] f32, contiguous: weights for :meth:`latency_combine`, unless it is given others.
        max_tokens: M, the most tokens of any rank in this call. The same on every rank, as ``num_experts``,
            ``slab_capacity``, ``quantize``, ``expert_to_rank`` and ``placement``.
        slab_capacity: C; by default R * M, which is always enough. More rows for one expert raise CapacityExceeded.
        scales: [T, S] f32, i32 or u8, any strides, of rows that are quantised already.
        num_tokens: i32 of one element: number of tokens that count, from the first on. The others are treated as if
            their ids were -1: nothing is sent for them, and combine gives zeros. A value below 0 means 0, above T means
            T. On a GPU the kernels read it, so that a graph may be replayed with other numbers.
        quantize: turn bf16 rows into FP8 or INT8 on their way, as :func:`ferry.quantize` would.
        column_major_scales: the scales that are made lie in memory by column, the rows of an expert one after another.
        zero_padding: clear rows that hold no token; otherwise those of ``out`` stay as they are.
        split: only send, and return at once; ``receive`` of the result is the other half. All ranks make calls in one
            order, but may receive in any, with other calls between. At most two dispatches may be in flight, and two
            combines. Tensors that are sent must not be changed until the call is received (on a GPU: by other streams,
            until sent).
        out, out_scales: where to receive, [L, C, H] or [L * C, H], and [L, C, S] or [L * C, S] with any strides; by
            default new tensors, ``out`` in symmetric memory where peers write it: on CPUs, and over several nodes.
        expert_to_rank: the owner of each expert; by default contiguous blocks of experts, evenly distributed.
        placement, counters: as in :meth:`route`; the counts are added when the call is over.
        wait_times_ns: [R] i64, contiguous: the time that this call waits for each rank is added, as
            :attr:`Group.wait_times_ns` counts it; for a split call, that of its receive half. On a GPU in stream order,
            in every replay of a graph.
        num_sms: on a GPU, the most multiprocessors to use; 0: as many as were measured to be fastest.
        """
        if isinstance(num_tokens, torch.Tensor) and num_tokens.dim() == 0:
            num_tokens = num_tokens.view(1)
        tensors = (x, scales, topk_idx, topk_weights, out, out_scales, num_tokens, wait_times_ns)
        sent = Sent("latency_dispatch", self, *tensors) if split else None
        rows, made_scales, native = _native.latency_dispatch(
            self._calls,
            *tensors,
            num_experts,
            max_tokens,
            slab_capacity,
            expert_to_rank,
            quantize,
            bool(column_major_scales),
            bool(zero_padding),
            sent,
            num_sms,
            placement,
            counters,
        )
        self._made(sent, native)
        return LatencyDispatched(rows, made_scales, Routing(native, self, topk_weights is not None, False), sent)

    @eager
    def latency_combine(
        self,
        x: torch.Tensor,
        dispatched: LatencyDispatched | Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        order: CombineOrder = "exact",
        split: bool = False,
        out: torch.Tensor | None = None,
        wait_times_ns: torch.Tensor | None = None,
        num_sms: int = 0,
        wire_format: WireFormat | None = None,
        signals: TileSignals | None = None,
    ) -> LatencyCombined:
        """Return the experts' rows to their source ranks and sum each token's, weighted, in fp32. Collective.

        x: [L, C, H] or [L * C, H] bf16 or f32, one row per received row; rows without a token are not read.
        dispatched: the result of :meth:`latency_dispatch`, once received, or its routing.
        topk_weights: [T, K] f32, contiguous; by default those given to the dispatch.
        order: "exact": as a weighted :meth:`combine`, rounded once; "rank_sums": each rank rounds the sum of its rows
            of a token, so that a token has one row from each rank, and the sum of those is rounded again. The same on
            every rank.
        split, wait_times_ns, num_sms: as in :meth:`latency_dispatch`.
        out: [T, H] of x's dtype; by default a new tensor.
        wire_format: "fp8", with order "rank_sums", bf16 rows and H a multiple of 128: each rank quantises its fp32 sum,
            as :func:`ferry.quantize` would, instead of rounding it. Groups with ``verify=True`` refuse it. The same on
            every rank.
        signals: reports rows of x as final while the call runs; by default all are before the call, on a GPU in stream
            order. May be given on some ranks only. The words must not be changed until the call is received, but by the
            computation. CPU ranks wait where a split call is made, in ``receive`` or the next call of all ranks.

        Raises InvalidArgument for a wrong argument, or if ranks disagree; Unsupported for "fp8" with order "exact",
        with f32 rows, or in a group that verifies its rows, and for ``signals`` there or in a group that masks lost
        ranks.
        """
        routing = dispatched.routing if isinstance(dispatched, LatencyDispatched) else dispatched
        tensors = (x, topk_weights, out, wait_times_ns)
        sent = Sent("latency_combine", self, *tensors, signals) if split else None
        sums = _native.latency_combine(self._calls, self, routing, *tensors, order, sent, num_sms, wire_format, signals)
        self._made(sent, routing._native)
        return LatencyCombined(sums, sent)

    def latency_update_mask(self, rank: int, masked: bool = True) -> None:
        """Mask a rank, or unmask it, in a group that was created with ``mask_lost_ranks=True``. Local.

        Calls of latency mode that wait for a rank in vain also mask it. From then on this rank's calls of latency mode
        neither wait for a masked rank nor send to it: it has 0 tokens, and its experts add nothing to the sums.
        Masks are this rank's own, so mask by hand on all ranks between the same two calls. A masked rank may return if
        it has made all calls that the others have made: unmask on all ranks, itself included, between the same two
        calls, with a barrier of the process group before and after. On a GPU effective for later work on the current
        stream.
        """
        self._native.latency_update_mask(rank, bool(masked), self._memory.stream())

    def latency_query_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R] i32, contiguous: 1 for each rank that this one masks, else 0. Local; on a GPU, in stream order."""
        if out is None:
            out = torch.empty(self.num_ranks, dtype=torch.int32, device=self.device)
        self._native.latency_query_mask(out, self._memory.stream())
        return out

    def latency_clear_mask(self) -> None:
        """Unmask all ranks, see :meth:`latency_update_mask`."""
        self._native.latency_clear_mask(self._memory.stream())

    def _made(self, sent: Sent | None, native: _native.Routing) -> None:
        """A call was just made, or its send half."""
        if sent is None:
            self._in_flight.made_whole()
        else:
            sent.sent_with(native)


def latency_bytes_required(
    *,
    num_ranks: int,
    max_tokens: int,
    num_topk: int,
    dispatch_row_bytes: int,
    combine_row_bytes: int,
    order: CombineOrder = "exact",
    backend: str = "cuda",
) -> int:
    """Least ``latency_bytes`` of :class:`ferry.Group` for calls of latency mode. 0 for backend "cpu".

    num_ranks: R. max_tokens: M, the most tokens of any rank. num_topk: K. dispatch_row_bytes: a row as it travels, with
    its scales (as quantised, if it is). combine_row_bytes: a row of the experts' output. order: of all combines;
    "rank_sums" needs less where K is more than R, "exact" serves both.

    Raises InvalidArgument for a negative number or another order, Unsupported if this build has no such backend.
    """
    shape = (num_ranks, max_tokens, num_topk, dispatch_row_bytes, combine_row_bytes)
    if order not in _ORDERS:
        raise InvalidArgument(
            f"latency_bytes_required: order is {order!r}, expected one of {', '.join(map(repr, _ORDERS))}"
        )
    return _native.latency_bytes_required(str(backend), *shape, _ORDERS.index(order))

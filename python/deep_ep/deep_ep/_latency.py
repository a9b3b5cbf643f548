"""The first generation's latency mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ferry
from deep_ep._latency_handles import CombineMemory, ReceiveHook
from deep_ep._member import Member
from deep_ep._run import run_in_order
from deep_ep.utils.event import EventOverlap
from ferry import InvalidArgument
from ferry.frontend import BufferCalls, eager

Hook = Callable[[], None]
Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LatencyCalls:
    """Calls of latency mode, of a buffer that was made with ``low_latency_mode=True``.

    Shapes: T tokens of this rank, M = num_max_dispatch_tokens_per_rank, R ranks, L = E / R local experts, K choices.
    """

    _member: Member
    _combine_memory: CombineMemory
    low_latency_mode: bool
    enable_shrink: bool

    @eager
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **unknown: Any,
    ) -> tuple[Payload, torch.Tensor, tuple, EventOverlap, Hook | None]:
        """Send each token to its experts, into a slab of R * M rows for each. Collective.

        x: [T, H] bf16, contiguous, T <= M; rows of multiples of 16 bytes. topk_idx: [T, K] ``deep_ep.topk_idx_t``,
            contiguous; -1 for no expert. A token that names an expert twice is one row there.
        num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0: the same on every rank.
        cumulative_local_expert_recv_stats: [L] i32: the rows that each local expert received are added, by the hook if
            there is one.
        dispatch_wait_recv_cost_stats: [R] i64: the time that this call waits for each rank is added, in nanoseconds
            (not in clock cycles), once for all experts of a rank; with a hook, the time that the hook waits.
        use_fp8: rows become FP8 on their way, with a f32 scale for 128 channels (amax / 448). round_scale: the scales
            are powers of two. use_ue8m0, with round_scale: their exponents, four in an i32.
        async_finish: the returned event must be waited for. Otherwise the current stream waits.
        return_recv_hook: only send; the rows, counts and the handle's tensors are complete when ``hook()`` has
            returned, on a GPU for later work on the stream that was current then. It must be called once, and raises if
            it is called again. Until then x must not be changed. At most two dispatches may be between the two.

        Returns the rows [L, R * M, H], bf16, or (FP8 rows, scales [L, R * M, ceil(H / 128)] f32 or ceil(H / 512) i32,
        whose rows of an expert lie one after another in memory); rows of each local expert [L] i32; the handle; the
        event; and the hook or None. The first rows of each expert hold tokens, by source rank, then token; the contents
        of the others are unspecified. The handle is (src_info [L, R * M] i32, the token at its source of each row;
        layout_range [L, R] i64, first row << 32 | number of rows from a rank; M; H; E). Its tensors and the counts are
        views of memory that later calls use: do not write to them. src_info is not contiguous.
        """
        what = "low_latency_dispatch"
        calls = self._calls_for(what)
        tensors = (x, topk_idx, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        hook = ReceiveHook(what, self._member.group, *tensors) if return_recv_hook else None
        return run_in_order(
            self._member,
            what,
            None,
            async_finish,
            unknown,
            tensors,
            calls.low_latency_dispatch,
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            hook,
            bool(use_fp8),
            bool(round_scale),
            bool(use_ue8m0),
            problem=_wrong_options(what, async_finish and return_recv_hook),
        )

    @eager
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int | None = None,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int | None = None,
        **unknown: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Return the experts' rows and sum each token's, each times its weight. Collective.

        x: [L, R * M, H] bf16, contiguous. handle: of the dispatch, once received; H may differ from that of its rows if
            the handle's fourth value is changed too.
        topk_idx: [T, K], as for the dispatch: checked; the experts are those of the dispatch. topk_weights: [T, K] f32,
            contiguous.
        use_logfmt: True raises NotImplementedError.
        zero_copy: read the rows from the memory that :meth:`get_next_low_latency_combine_buffer` returned for this
            handle, not from ``x``.
        out: [T, H] bf16, contiguous, for the sums; by default a new tensor.
        combine_wait_recv_cost_stats: [R] i64: as in :meth:`low_latency_dispatch`.
        async_finish, return_recv_hook: as in :meth:`low_latency_dispatch`; until the hook has returned, the rows must
            not be changed.
        overlap: the rows may still be computed when the call begins; it reads those of a tile once the tile's word has
            reached a value, see :class:`ferry.TileSignals`. On CPUs a call with a hook waits for them in the hook.
            Without it the arguments below have no effect.
        comp_signal: words of tiles of block_m rows, int32 or uint32, contiguous: the first L * ceil(R * M / block_m) of
            a flat tensor, or [L, ceil(R * M / block_m)]. A tile's rows are final at ``threshold``.
        src_signals: in place of comp_signal [L]: an expert's rows are final at ``src_signal_expect_value``.
        num_sms: most multiprocessors of the call's first half, with a hook; by default 3 for comp_signal, and for
            src_signals 32, as engines leave them free. packed_recv_count: without effect, the handle has the counts.

        Each rank sums its rows of a token in fp32, by ascending row, and rounds to bf16; the token's source adds those
        in fp32, by ascending rank, and rounds. Returns the sums [T, H] bf16, the event, and the hook or None.
        """
        what = "low_latency_combine"
        calls = self._calls_for(what)
        signals = None
        if overlap and src_signals is None:
            signals = ("comp_signal", _as_int32(comp_signal), block_m, threshold, 3 if num_sms is None else num_sms)
        elif overlap:
            most = 32 if num_sms is None else num_sms
            signals = ("src_signals", _as_int32(src_signals), None, src_signal_expect_value, most)
        tensors = (x, topk_weights, out, combine_wait_recv_cost_stats, signals[1] if signals else None)
        hook = ReceiveHook(what, self._member.group, *tensors) if return_recv_hook else None
        return run_in_order(
            self._member,
            what,
            None,
            async_finish,
            unknown,
            tensors,
            calls.low_latency_combine,
            x,
            topk_idx,
            topk_weights,
            handle,
            out,
            combine_wait_recv_cost_stats,
            bool(zero_copy),
            hook,
            signals,
            problem=_wrong_options(what, async_finish and return_recv_hook, use_logfmt)
            or (_wrong_signals(what, comp_signal, src_signals) if overlap else None),
        )

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Checks its arguments and does nothing else, without waiting for other ranks: calls of both modes and of any
        shapes may follow each other.
        """
        what = "clean_low_latency_buffer"
        self._calls_for(what).check_latency_shape(num_max_dispatch_tokens_per_rank, hidden, num_experts, what)

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """Memory [L, R * M, H] bf16 for the rows that :meth:`low_latency_combine` with ``zero_copy=True`` returns.

        Always the same for one handle. Two handles have memory of their own; a third gets that of the first, whose
        combine must be over by then. It is symmetric memory, taken when first asked for, and kept with the buffer.
        """
        what = "get_next_low_latency_combine_buffer"
        link, shape = self._calls_for(what).slab_of(handle, what)
        if link.combine_memory is None or tuple(link.combine_memory.shape) != shape:
            link.combine_memory = self._combine_memory.next(self._member.group, shape)
        return link.combine_memory

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, or unmask it with ``mask=False``. Local; of a buffer with ``enable_shrink=True``.

        Calls of latency mode that wait 100 s for a rank in vain, or that notice its death, also mask it. They neither
        wait for a masked rank nor send to it: it has 0 tokens, and its experts add nothing to
        the sums. Masks are this rank's own. A masked rank may return if it has made all calls that the
        others have made and all ranks, itself included, unmask between the same two calls, with a barrier of the
        process group before and after.
        """
        with self._masking("low_latency_update_mask_buffer") as group:
            group.latency_update_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """mask_status: [R] i32, contiguous: becomes 1 for each rank that this one masks, else 0. Local."""
        with self._masking("low_latency_query_mask_buffer") as group:
            group.latency_query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks, as :meth:`low_latency_update_mask_buffer` does one. Local."""
        with self._masking("low_latency_clean_mask_buffer") as group:
            group.latency_clear_mask()

    @contextlib.contextmanager
    def _masking(self, what: str) -> Iterator[ferry.Group]:
        """The group of a buffer that can mask ranks. Known errors are raised at the end."""
        self._calls_for(what)
        if not self.enable_shrink:
            raise InvalidArgument(f"{what}: the buffer was created with enable_shrink=False, expected True")
        yield self._member.group
        self._member.group.poll()

    def _calls_for(self, what: str) -> BufferCalls:
        """The native calls, of a buffer in latency mode. All ranks make their buffers alike, so that no rank waits for
        one that is refused here.
        """
        calls = self._member.calls or self._member.refuse(what)
        if not self.low_latency_mode:
            raise InvalidArgument(f"{what}: the buffer was created with low_latency_mode=False, expected True")
        return calls


def _wrong_options(what: str, has_two_ends: bool, use_logfmt: bool = False) -> Exception | None:
    """Exception that the call raises on this rank and refuses on all."""
    if has_two_ends:
        return InvalidArgument(f"{what}: async_finish and return_recv_hook are both True, expected at most one of them")
    if use_logfmt:
        return NotImplementedError(f"{what}: use_logfmt=True is not implemented; rows are returned as bf16")
    return None


def _wrong_signals(what: str, comp_signal: object, src_signals: object) -> Exception | None:
    """As :func:`_wrong_options`, of a call with ``overlap=True``."""
    if (comp_signal is None) != (src_signals is None):
        return None
    found = "neither comp_signal nor src_signals is" if comp_signal is None else "both comp_signal and src_signals are"
    return InvalidArgument(f"{what}: overlap is True and {found} given, expected one of them")


def _as_int32(words: Any) -> Any:
    """The same words; the native calls read no tensors of uint32."""
    return words.view(torch.int32) if isinstance(words, torch.Tensor) and words.dtype == torch.uint32 else words

"""Dispatch and combine as functions of JAX, with gradients, for CPU ranks.

    routing = ferry.jax.route(group, topk_idx, num_experts=256)
    rows, local_idx, weights = ferry.jax.dispatch(routing, x, topk_weights)
    out = ferry.jax.combine(routing, experts(rows, local_idx, weights))

They work eagerly, in ``jax.jit`` and under ``jax.grad``: the backward pass of a dispatch is a combine, and that of a
combine a dispatch. Each rank is a process whose JAX has one CPU device in use; the group is a :class:`ferry.Group` on
CPUs. Needs JAX 0.7 or later, which this package installs only as ``ferry-ep[jax]``, and torch, as the rest of it.

All shapes are known before the exchange, as XLA needs them, so ``dispatch`` returns as many rows as can come at most.

**Order.** All ranks must make the same calls in the same order. XLA runs calls in the order of their data: a combine
after the dispatch whose rows it takes. Two exchanges that do not depend on each other, such as two layers side by side,
may run in any order, another one on each rank; make the second depend on the first, or let each have its own group.

**Errors** of a call, as of :class:`ferry.Group`, arrive in a ``jax.errors.JaxRuntimeError`` whose text has that of the
``ferry`` exception. As JAX runs programs asynchronously, it may be raised where the result is used.

Calls go through ``jax.experimental.buffer_callback``: they read and write XLA's buffers in place, and hold the GIL
except while they exchange. JAX keeps calls with effects out of ``jax.checkpoint``, and ``vmap`` and ``shard_map`` are
not supported either; GPU ranks are not yet.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch

from ferry._errors import InvalidArgument, Unsupported
from ferry._group import Group
from ferry._routing import Routing as GroupRouting

try:
    import jax
    import jax.numpy as jnp
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(f"ferry.jax: {error}; expected JAX 0.7 or later, pip install 'jax>=0.7'") from error

__all__ = ["KEPT_ROUTINGS", "Routing", "combine", "dispatch", "route"]

KEPT_ROUTINGS = 64
"""Routings of a group that are kept, the latest ones: a route drops the one before so many others. Between a route and
the last call that uses it, backward included, at most this number less one of other routes may be made."""


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Facts of a routing that XLA needs beforehand. Compared by the group's identity."""

    group: Group
    num_tokens: int
    num_topk: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Routing:
    """Destination of every token: the result of :func:`route`. A pytree, which jitted functions may take and return."""

    handle: jax.Array
    """[1] i32: number of the routing in its group, the same on every rank."""
    shape: _Shape

    @property
    def num_rows(self) -> int:
        """N: rows that :func:`dispatch` returns."""
        return self.shape.num_rows


jax.tree_util.register_dataclass(Routing, data_fields=["handle"], meta_fields=["shape"])


class _Kept:
    """The latest routings of a group by number. All ranks drop the same ones, since they make the same routes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routings: OrderedDict[int, GroupRouting[Group]] = OrderedDict()
        self._next = 1

    def add(self, routing: GroupRouting[Group]) -> int:
        with self._lock:
            number = self._next
            self._next += 1
            self._routings[number] = routing
            if len(self._routings) > KEPT_ROUTINGS:
                self._routings.popitem(last=False)
        return number

    def of(self, number: int, what: str) -> GroupRouting[Group]:
        with self._lock:
            routing = self._routings.get(number)
        if routing is None:
            raise InvalidArgument(
                f"{what}: the group's routing {number} is not kept, its latest one is {self._next - 1} and "
                f"{KEPT_ROUTINGS} are kept; route again, or make fewer routes between a route and its backward pass"
            )
        return routing


_kept: weakref.WeakKeyDictionary[Group, _Kept] = weakref.WeakKeyDictionary()


def _call(what: str, body: Any, results: Any, *arguments: Any) -> Any:
    """``body(outputs, *arguments)`` on tensors that share memory with XLA's buffers; absent ones are None."""

    def on_buffers(_: Any, outputs: Any, *buffers: Any) -> None:
        tensors = jax.tree.map(torch.from_dlpack, (outputs, buffers))
        body(tensors[0], *tensors[1])

    on_buffers.__name__ = what.replace(".", "_")
    return buffer_callback(on_buffers, results, has_side_effect=True)(*arguments)


def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def route(group: Group, topk_idx: jax.Array, *, num_experts: int, max_recv_rows: int | None = None) -> Routing:
    """Exchange counts and determine where every token goes, as :meth:`ferry.Group.route` with layout "tokens".
    Collective; has no gradient.

    group: CPU ranks; raises Unsupported for others. topk_idx: [T, K] integers: global expert ids, -1 for none.
    num_experts: E. max_recv_rows: N, rows that this rank has room for; by default R * T, which is enough if no rank has
    more tokens than this one. If more arrive, the call fails with CapacityExceeded.
    """
    what = "ferry.jax.route"
    if group.device.type != "cpu":
        raise Unsupported(
            f"{what}: the group is on {group.device}, expected a group of CPU ranks; examples/17_jax.py serves GPUs"
        )
    if topk_idx.ndim != 2 or not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise InvalidArgument(f"{what}: topk_idx is {topk_idx.dtype}{list(topk_idx.shape)}, expected integers [T, K]")
    num_tokens, num_topk = topk_idx.shape
    num_rows = group.num_ranks * num_tokens if max_recv_rows is None else max_recv_rows
    kept = _kept.setdefault(group, _Kept())

    def body(handle: torch.Tensor, ids: torch.Tensor) -> None:
        routing = group.route(ids, num_experts=num_experts, max_recv_rows=num_rows)
        handle.fill_(kept.add(routing))

    handle = _call(what, body, _struct((1,), jnp.int32), jax.lax.stop_gradient(topk_idx))
    return Routing(handle, _Shape(group, num_tokens, num_topk, num_rows))


def _exchange_out(shape: _Shape, handle: jax.Array, x: jax.Array, weights: jax.Array | None) -> tuple:
    """Rows [N, H]; with weights also local ids [N, K] i32 and weights [N, K] f32, else None."""
    what = "ferry.jax.dispatch"

    def body(out: tuple, number: torch.Tensor, tokens: torch.Tensor, token_weights: torch.Tensor | None) -> None:
        rows, ids, row_weights = out
        routing = _kept[shape.group].of(int(number), what)
        received = shape.group.dispatch(
            routing,
            tokens,
            topk_weights=token_weights,
            out=rows,
            tables=token_weights is not None,
            zero_padding=True,
        )
        if token_weights is not None:
            ids.copy_(received.topk_idx)
            row_weights.copy_(received.topk_weights)

    table = (shape.num_rows, shape.num_topk)
    has_weights = weights is not None
    results = (
        _struct((shape.num_rows, x.shape[1]), x.dtype),
        _struct(table, jnp.int32) if has_weights else None,
        _struct(table, jnp.float32) if has_weights else None,
    )
    return _call(what, body, results, handle, x, weights)


def _exchange_back(shape: _Shape, handle: jax.Array, y: jax.Array, weights: jax.Array | None) -> tuple:
    """Sums [T, H] and, if weights [N, K] are given, those of each token's experts [T, K], else None."""
    what = "ferry.jax.combine"

    def body(out: tuple, number: torch.Tensor, rows: torch.Tensor, row_weights: torch.Tensor | None) -> None:
        sums, summed_weights = out
        routing = _kept[shape.group].of(int(number), what)
        combined = shape.group.combine(routing, rows, weights=row_weights, out=sums)
        if row_weights is not None:
            summed_weights.copy_(combined.weights)

    results = (
        _struct((shape.num_tokens, y.shape[1]), y.dtype),
        None if weights is None else _struct((shape.num_tokens, shape.num_topk), jnp.float32),
    )
    return _call(what, body, results, handle, y, weights)


# Each is the other's transpose, and its backward pass applies the other, so that gradients have gradients, too.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(shape: _Shape, handle: jax.Array, x: jax.Array, weights: jax.Array | None) -> tuple:
    return _exchange_out(shape, handle, x, weights)


def _dispatch_forward(shape: _Shape, handle: jax.Array, x: jax.Array, weights: jax.Array | None) -> tuple:
    out = _dispatch(shape, handle, x, weights)
    return out, (handle, out[1])


def _dispatch_backward(shape: _Shape, kept: tuple, gradients: tuple) -> tuple:
    handle, local_idx = kept
    of_rows, _, of_weights = gradients
    if local_idx is not None:
        # Weights of experts on other ranks were constants here, in whatever way the program used them.
        of_weights = jnp.where(local_idx < 0, 0.0, of_weights)
    return None, *_combine(shape, handle, of_rows, of_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(shape: _Shape, handle: jax.Array, y: jax.Array, weights: jax.Array | None) -> tuple:
    return _exchange_back(shape, handle, y, weights)


def _combine_forward(shape: _Shape, handle: jax.Array, y: jax.Array, weights: jax.Array | None) -> tuple:
    return _combine(shape, handle, y, weights), handle


def _combine_backward(shape: _Shape, handle: jax.Array, gradients: tuple) -> tuple:
    rows, _, weights = _dispatch(shape, handle, *gradients)
    return None, rows, weights


jax.custom_vjp.defvjp(_dispatch, _dispatch_forward, _dispatch_backward)
jax.custom_vjp.defvjp(_combine, _combine_forward, _combine_backward)


def dispatch(
    routing: Routing, x: jax.Array, topk_weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Send each token to the ranks of its experts, with gradients to ``x`` and ``topk_weights``. Collective, and so is
    its backward pass. All ranks give weights, or none.

    x: [T, H] bf16 or f32, rows of whole multiples of 16 bytes. topk_weights: [T, K] f32.
    Returns rows [N, H], by source rank, then token, and zero where there is none; and, where weights were given, ids of
    this rank's experts [N, K] i32, -1 for experts of other ranks and in rows without a token, and weights [N, K], 0
    there; else None for both.
    """
    return _dispatch(routing.shape, routing.handle, x, topk_weights)


def combine(routing: Routing, y: jax.Array) -> jax.Array:
    """The sum [T, H] of each token's rows, added in fp32 in a fixed order, with a gradient to ``y``. Collective, and so
    is its backward pass.

    y: [N, H] bf16 or f32: outputs of this rank's experts, one row for each row of :func:`dispatch`.
    """
    return _combine(routing.shape, routing.handle, y, None)[0]

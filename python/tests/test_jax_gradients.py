"""ferry.jax: results and gradients of two ranks against a dense layer in JAX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

import ferry

NUM_RANKS, NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 2, 6, 8, 3, 4
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS

# Not imported here, so that ranks are forked before JAX has threads.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="needs JAX (python/requirements-jax.txt)"
)


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


class Layer:
    """A layer whose experts are tanh of products, by an exchange and dense, with inputs of all ranks."""

    def __init__(self, rank: int) -> None:
        import jax

        self.rank = rank
        self.group = ferry.Group(dist.group.WORLD, device="cpu")
        keys = [jax.random.split(jax.random.key(one), 3) for one in range(NUM_RANKS)]
        self.x = [jax.random.normal(key[0], (NUM_TOKENS, HIDDEN)) for key in keys]
        self.weights = [jax.random.uniform(key[1], (NUM_TOKENS, NUM_TOPK)) for key in keys]
        # Also -1, for no expert, and experts that a token names twice.
        self.ids = [jax.random.randint(key[2], (NUM_TOKENS, NUM_TOPK), -1, NUM_EXPERTS) for key in keys]
        self.experts = jax.random.normal(jax.random.key(9), (NUM_EXPERTS, HIDDEN, HIDDEN))

    def _rank_sum(self, rows: Any, local_idx: Any, weights: Any, experts: Any) -> Any:
        """Output of a rank for a row: tanh of the weighted sum of its experts' products."""
        import jax
        import jax.numpy as jnp

        chosen = (jax.nn.one_hot(local_idx, NUM_LOCAL) * weights[:, :, None]).sum(1)
        return jnp.tanh(jnp.einsum("nh,lhk,nl->nk", rows, experts, chosen))

    def exchanged(self, x: Any, weights: Any, experts: Any) -> Any:
        import ferry.jax

        routing = ferry.jax.route(self.group, self.ids[self.rank], num_experts=NUM_EXPERTS)
        rows, local_idx, row_weights = ferry.jax.dispatch(routing, x, weights)
        mine = experts[self.rank * NUM_LOCAL : (self.rank + 1) * NUM_LOCAL]
        return ferry.jax.combine(routing, self._rank_sum(rows, local_idx, row_weights, mine))

    def dense(self, source: int, x: Any, weights: Any, experts: Any) -> Any:
        import jax.numpy as jnp

        out = jnp.zeros_like(x)
        for rank in range(NUM_RANKS):
            local = self.ids[source] - rank * NUM_LOCAL
            local = jnp.where((self.ids[source] >= 0) & (local >= 0) & (local < NUM_LOCAL), local, -1)
            out += self._rank_sum(x, local, weights, experts[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL])
        return out

    def inputs(self) -> tuple:
        return self.x[self.rank], self.weights[self.rank], self.experts

    def all_dense(self, experts: Any) -> Any:
        """Loss of all ranks, whose gradient to the experts each rank has for its own ones."""
        sources = range(NUM_RANKS)
        return sum((self.dense(one, self.x[one], self.weights[one], experts) ** 2).sum() for one in sources)


def _gradients_are_dense(rank: int) -> None:
    import jax
    import numpy as np

    layer = Layer(rank)

    def exchanged(*inputs: Any) -> Any:
        return (layer.exchanged(*inputs) ** 2).sum()

    own_dense = jax.jit(lambda *inputs: (layer.dense(rank, *inputs) ** 2).sum())
    expected, dense = jax.value_and_grad(own_dense, (0, 1, 2))(*layer.inputs())
    of_experts = jax.jit(jax.grad(layer.all_dense))(layer.experts)
    mine = slice(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL)
    eager, jitted = (jax.value_and_grad(run, (0, 1, 2)) for run in (exchanged, jax.jit(exchanged)))
    for run in (eager, jitted, jitted):
        loss, gradients = run(*layer.inputs())
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(gradients[0], dense[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradients[1], dense[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradients[2][mine], of_experts[mine], rtol=1e-4, atol=1e-5)
    assert np.abs(dense[1]).max() > 0.1, "the gradient of weights is tested"


def test_gradients_are_those_of_the_dense_layer() -> None:
    run_ranks(NUM_RANKS, _gradients_are_dense)


def _second_derivative(rank: int) -> None:
    import jax
    import numpy as np

    layer = Layer(rank)
    x, weights, experts = layer.inputs()

    def penalty(of: Callable) -> Callable:
        gradient = jax.grad(lambda x: (of(x) ** 2).sum())
        return jax.jit(jax.grad(lambda x: (gradient(x) ** 2).sum()))

    exchanged = penalty(lambda x: layer.exchanged(x, weights, experts))(x)
    dense = penalty(lambda x: layer.dense(rank, x, weights, experts))(x)
    np.testing.assert_allclose(exchanged, dense, rtol=1e-3, atol=1e-3)


def test_gradients_have_gradients() -> None:
    run_ranks(NUM_RANKS, _second_derivative)


def _rows_are_those_of_the_group(rank: int) -> None:
    import jax.numpy as jnp
    import numpy as np
    import torch

    import ferry.jax

    layer = Layer(rank)
    x = layer.x[rank].astype(jnp.bfloat16)
    routing = ferry.jax.route(layer.group, layer.ids[rank], num_experts=NUM_EXPERTS)
    rows, local_idx, weights = ferry.jax.dispatch(routing, x, layer.weights[rank])
    assert routing.num_rows == len(rows) == NUM_RANKS * NUM_TOKENS
    bare = ferry.jax.dispatch(routing, x)
    assert bare[1] is None and bare[2] is None and jnp.array_equal(bare[0], rows)

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array.astype(jnp.float32)))

    ids = torch.from_numpy(np.array(layer.ids[rank]))
    expected = layer.group.route(ids, tensor(layer.weights[rank]), num_experts=NUM_EXPERTS)
    received = layer.group.dispatch(expected, tensor(x).bfloat16())
    num_rows = expected.num_recv_rows
    assert tensor(rows)[:num_rows].equal(received.x.float()) and not tensor(rows)[num_rows:].any()
    assert tensor(local_idx)[:num_rows].equal(received.topk_idx.float())
    assert bool((local_idx[num_rows:] == -1).all()) and not weights[num_rows:].any()
    assert tensor(weights)[:num_rows].equal(received.topk_weights)
    sums = layer.group.combine(expected, received.x).x
    assert tensor(ferry.jax.combine(routing, rows)).equal(sums.float())


def test_rows_and_sums_are_those_of_the_group() -> None:
    run_ranks(NUM_RANKS, _rows_are_those_of_the_group)


def _errors_name_the_cause(rank: int) -> None:
    import jax
    import jax.numpy as jnp

    import ferry.jax

    layer = Layer(rank)
    ids, x = layer.ids[rank], layer.x[rank]
    with pytest.raises(ferry.InvalidArgument, match=r"topk_idx is float32\[6, 8\], expected integers"):
        ferry.jax.route(layer.group, x, num_experts=NUM_EXPERTS)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)num_experts is 0"):
        ferry.jax.route(layer.group, ids, num_experts=0).handle.block_until_ready()

    ferry.jax.KEPT_ROUTINGS = 2
    first = ferry.jax.route(layer.group, ids, num_experts=NUM_EXPERTS)
    second, third = (ferry.jax.route(layer.group, ids, num_experts=NUM_EXPERTS) for _ in range(2))
    numbers = [int(one.handle[0]) for one in (first, second, third)]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"routing {numbers[0]} is not kept, its latest one is"):
        ferry.jax.dispatch(first, x)[0].block_until_ready()
    assert jnp.array_equal(ferry.jax.dispatch(second, x)[0], ferry.jax.dispatch(third, x)[0])


def test_errors_name_the_cause() -> None:
    run_ranks(NUM_RANKS, _errors_name_the_cause)

"""num_sms: a number that a program chose bounds its calls, one that it was given does not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from clients import device_of, dispatch, inputs_of, make_buffer, make_elastic
from ranks import run_ranks
from world import World, make_world

import deep_ep
import ferry
import reference
from ferry.frontend import BufferCalls

EXPERTS = 6


class Bounds:
    """Bounds that the native calls were given, call by call."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int]] = []
        for name in ("dispatch", "combine"):
            for call in (name, f"{name}_again", f"elastic_{name}", f"elastic_{name}_again"):
                if hasattr(BufferCalls, call):
                    setattr(BufferCalls, call, self._watched(name, getattr(BufferCalls, call)))

    def _watched(self, name: str, call: Any) -> Any:
        """A native call, whose last argument is num_sms."""

        def watched(calls: BufferCalls, *arguments: Any) -> Any:
            made = call(calls, *arguments)
            self._found.append((name, calls.bound_of(arguments[-1], name)))
            return made

        return watched

    def take(self) -> list[tuple[str, int]]:
        found, self._found = self._found, []
        return found


def check_legacy(rank: int, world: World, device: str) -> None:
    bounds = Bounds()
    buffer = make_buffer(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    bounds.take()

    def both(config: deep_ep.Config | None = None) -> None:
        x, _, weights, _, handle, _ = dispatch(buffer, world, mine, config=config)
        for _ in range(2):
            assert torch.equal(x.cpu(), reference.received_rows(world, rank))
            out, _, _ = buffer.combine(reference.scaled(x, rank), handle, weights, config=config)
            assert torch.equal(out.cpu(), reference.combined(world, rank, []))
            x, *_ = buffer.dispatch(mine.x, handle=handle, config=config)

    for config, expected in [
        (None, 0),
        (deep_ep.Config(), 0),
        (buffer.get_dispatch_config(2), 0),
        (deep_ep.Config(2), 2),
        (deep_ep.Config(20), 20),
    ]:
        both(config)
        assert set(bounds.take()) == {("dispatch", expected), ("combine", expected)}
    buffer.set_num_sms(2)
    for config in (None, buffer.get_combine_config(2)):
        both(config)
        assert set(bounds.take()) == {("dispatch", 2), ("combine", 2)}
    # A channel is two multiprocessors, whether the program or the package chose them.
    assert dispatch(buffer, world, mine)[4][1].shape == (world.num_ranks, 1)
    buffer.destroy()


def test_first_generation(device: str) -> None:
    run_ranks(2, check_legacy, make_world(2, EXPERTS, [40, 33]), device)


def check_elastic(rank: int, world: World, device: str, expand: bool) -> None:
    bounds = Bounds()
    buffer = make_elastic(rank, device)
    mine = inputs_of(world, rank, device_of(rank, device))
    bounds.take()
    suggested = buffer.get_theoretical_num_sms(EXPERTS, 3)
    for given, expected in [(0, 0), (suggested, 0), (2, 2), (int(suggested), suggested)]:
        x, *_, handle, _ = buffer.dispatch(
            mine.x, mine.idx, num_experts=EXPERTS, num_sms=given, do_expand=expand, do_zero_padding=True
        )
        again, *_ = buffer.dispatch(mine.x, handle=handle, num_sms=handle.num_sms, do_zero_padding=True)
        assert torch.equal(again, x)
        assert bounds.take() == [("dispatch", expected)] * 2
        out, _, _ = buffer.combine(x, handle)
        for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
            # Copies that were not made by copy.copy route again.
            assert torch.equal(buffer.combine(x, copied)[0], out)
        assert torch.equal(buffer.combine(x, handle, num_sms=4)[0], out)
        assert bounds.take() == [("combine", expected)] * 4 + [("combine", 4)]
        assert handle.num_sms == (given or suggested)
        if not expand:
            x = reference.scaled(x, rank)
            assert torch.equal(buffer.combine(x, handle)[0].cpu(), reference.combined(world, rank, []))
            bounds.take()
    for wrong in (-1, "2", 1 << 40):
        with pytest.raises(ferry.InvalidArgument, match="num_sms"):
            buffer.dispatch(mine.x, mine.idx, num_experts=EXPERTS, num_sms=wrong)
    buffer.dispatch(mine.x, mine.idx, num_experts=EXPERTS)
    buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
def test_second_generation(device: str, expand: bool) -> None:
    run_ranks(2, check_elastic, make_world(2, EXPERTS, [30, 17]), device, expand)

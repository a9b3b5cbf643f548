"""EventHandle and EventOverlap on their own, and the streams of the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import deep_ep
from deep_ep import _streams


class Waited(deep_ep.EventHandle):
    def __init__(self) -> None:
        self.waits = 0

    def current_stream_wait(self) -> None:
        self.waits += 1


def test_overlap_waits_when_its_block_ends() -> None:
    handle = Waited()
    overlap = deep_ep.EventOverlap(handle, (torch.zeros(1),))
    with overlap as inside:
        assert inside is overlap and handle.waits == 0
    assert handle.waits == 1
    with overlap(release_handle=True):
        pass
    assert handle.waits == 2 and overlap.event is None and overlap.extra_tensors is None
    with overlap:
        pass
    overlap.current_stream_wait()
    assert handle.waits == 2
    overlap.event = handle
    overlap.current_stream_wait()
    assert handle.waits == 3


def test_hooks_run_once_after_the_wait() -> None:
    handle, seen = Waited(), []
    overlap = deep_ep.EventOverlap(handle)
    overlap.register_hook_after_wait(lambda: seen.append(handle.waits))
    overlap.current_stream_wait()
    overlap.current_stream_wait()
    assert seen == [1]


def test_a_wait_returns_what_the_first_hook_returns() -> None:
    overlap = deep_ep.EventOverlap(Waited())
    for value in (3, 4):
        overlap.register_hook_after_wait(lambda value=value: value)
    assert (overlap.wait(), overlap.wait(), overlap.current_stream_wait()) == (3, None, None)
    overlap.register_hook_after_wait(lambda: 5)
    assert overlap.current_stream_wait(release_handle=True) == 5 and overlap.event is None


def test_nothing_to_wait_for() -> None:
    deep_ep.EventHandle().current_stream_wait()
    assert isinstance(deep_ep.Buffer.capture(), deep_ep.EventOverlap)
    assert isinstance(deep_ep.ElasticBuffer.capture(), deep_ep.EventHandle)
    assert not torch.cuda.is_initialized()
    stream = _streams.lane_of(torch.device("cpu")).comm_stream
    with stream:
        event = stream.record_event()
    stream.wait_event(event)
    stream.wait_stream(stream)
    event.synchronize()
    assert event.query() and stream.query()


class FakeStream:
    """Records the calls made on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: object) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return "the end"


class FakeTensor(torch.Tensor):
    """Records which streams use it."""

    def record_stream(self, stream: FakeStream) -> None:
        stream.log.append(f"{self.label} is used by {stream.name}")


def fake_tensor(name: str) -> FakeTensor:
    tensor = torch.zeros(1).as_subclass(FakeTensor)
    tensor.label = name
    return tensor


@pytest.fixture(params=[0, 1])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _streams.CudaLane:
    """Lane of GPU 0; the parameter is the current GPU."""
    log: list[str] = []
    stack = [FakeStream("compute", log)]

    @contextlib.contextmanager
    def current(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()
            log.append(f"off {stream.name}")

    def switch(stream: FakeStream) -> None:
        assert request.param == 0, "would change the current GPU"
        if stream is stack[0]:
            log.append(f"off {stack.pop().name}")
        else:
            stack.append(stream)
            log.append(f"on {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "set_stream", switch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream("comm", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stack[-1])
    monkeypatch.setattr(_streams, "_ids_of_current", None)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return _streams.CudaLane(torch.device("cuda", 0))


def test_a_wait_on_the_callers_stream(lane: _streams.CudaLane) -> None:
    lane.wait(None)
    lane.wait(_streams.HostEvent())
    assert lane.comm_stream.log == []
    lane.wait("what was before")
    assert lane.comm_stream.log == ["compute waits for what was before"]


def test_an_asynchronous_call_between_two_streams(lane: _streams.CudaLane) -> None:
    with lane.beside("what was before") as call:
        lane.wait(None)
        lane.wait("another")
    call.takes((fake_tensor("in"), None, [fake_tensor("bias")]))
    call.gives((fake_tensor("out"), None, (fake_tensor("scales"),), [1, 2]))
    assert call.event == "the end"
    assert lane.comm_stream.log == [
        "comm waits for what was before",
        "on comm",
        "comm waits for another",
        "event on comm",
        "off comm",
        "in is used by comm",
        "bias is used by comm",
        "out is used by compute",
        "scales is used by compute",
    ]


def test_a_call_that_fails_between_two_streams(lane: _streams.CudaLane) -> None:
    with pytest.raises(ZeroDivisionError), lane.beside(None):
        raise ZeroDivisionError
    assert lane.comm_stream.log[-1] == "compute waits for comm"


def test_streams_are_found_again(lane: _streams.CudaLane, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = (0, 0, 1)
    monkeypatch.setattr(_streams, "_known_streams", {})
    monkeypatch.setattr(_streams, "_ids_of_current", lambda index: ids)
    compute = _streams.current_stream(0)
    assert compute.name == "compute"
    with torch.cuda.stream(lane.comm_stream):
        assert _streams.current_stream(0) is compute
        ids = (1, 0, 1)
        assert _streams.current_stream(0) is lane.comm_stream

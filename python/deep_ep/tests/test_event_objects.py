"""EventHandle and EventOverlap by themselves, and the streams of the CPU."""

from __future__ import annotations

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

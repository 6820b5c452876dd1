"""Times of a device, by events that no step waits for; a device of this test where none is."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest
import torch
from families import build, prompts
from hypothesis import given
from hypothesis import strategies as st
from traced import assert_adds_up

import jackfield
from jackfield.engine import tracing
from jackfield.tracing import device
from jackfield.tracing.chrome import events
from jackfield.tracing.device import DeviceClock
from jackfield.tracing.recorder import Span, Work

DEVICE = torch.device("cuda:0")
WORK = Work("forward", "forward", where="device")


class FakeEvent:
    """An event of a device that lags behind the host. Its times are asked for in the end only."""

    lag = 5_000_000  # ns
    synchronized = capturing = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: int | None = None

    def record(self, stream: Any) -> None:
        assert not FakeEvent.capturing
        self.at = time.perf_counter_ns() + FakeEvent.lag

    def elapsed_time(self, other: FakeEvent) -> float:
        assert FakeEvent.synchronized, "the host would wait in a step"
        assert self.at is not None
        assert other.at is not None
        apart = (other.at - self.at) / 1e6
        return struct.unpack("f", struct.pack("f", apart))[0]  # type: ignore[no-any-return]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    def synchronize(_: Any) -> None:
        time.sleep(FakeEvent.lag / 1e9)
        FakeEvent.synchronized = True

    monkeypatch.setattr(FakeEvent, "synchronized", False)
    monkeypatch.setattr(FakeEvent, "capturing", False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeEvent.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return FakeEvent


def at(ns: int) -> FakeEvent:
    made = FakeEvent(enable_timing=True)
    made.at = ns
    return made


@given(st.lists(st.lists(st.integers(0, 10**7), min_size=2, max_size=6), max_size=8), st.data())
def test_stamps_are_placed_in_their_order(gaps: list[list[int]], data: st.DataObject) -> None:
    """However far from the end, and whatever a device's clock leaves out of a time."""
    clock, now, host = DeviceClock(DEVICE), 10**12, 10**15
    blocks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEvent, "synchronized", True)
        for block in gaps:
            spans = []
            begin = now
            for gap in block:
                start, now = now, now + gap
                spans.append(Span(WORK, start, now, None, (at(start), at(now))))
            spans.append(Span(WORK, begin, now, None, (at(begin), at(now))))
            spans.append(Span(WORK, begin, now, None, data.draw(st.sampled_from(
                [None, (None, at(now)), (at(begin), None)]
            ))))  # fmt: skip
            blocks.append(spans)
            now += 1000
        clock._end, clock._ended = at(now), host
        placed = clock.placed(blocks)
    before = 0
    for block, found in zip(blocks, placed, strict=True):
        *inner, outer, lost = found
        assert lost.device is None
        assert outer.device[0] >= before
        for span, was in zip(inner, block, strict=False):
            assert outer.device[0] <= span.device[0] <= span.device[1] <= outer.device[1]
            assert abs((host - span.device[0]) - (10**12 - was.begin + now - 10**12)) < 1000
        before = outer.device[1]


def test_no_event_goes_into_a_graph_that_is_recorded(cuda: type[FakeEvent]) -> None:
    cuda.capturing = True
    assert DeviceClock(DEVICE).stamp() is None


def test_an_engine_on_a_device(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "device_of", lambda model: (DeviceClock(DEVICE), []))
    made = jackfield.load(build("llama"), attn_implementation="sdpa")
    with made as engine, engine.trace() as trace:
        engine.generate(prompts((9, 4)), max_new_tokens=4)
    found = assert_adds_up(trace.record)
    assert cuda.synchronized
    forward = found.rows["steps", "forward"]
    assert 0 < found.rows["steps", "forward", "attention"].device < forward.device
    assert found.rows["steps", "preparing"].device == 0
    assert "device ms" in str(trace)
    assert "by layer, ms on the device" in str(trace)
    tracks = {
        (event["pid"], event["tid"])
        for event in events(trace.record, found)["traceEvents"]
        if event["name"] == "forward"
    }
    assert tracks == {(1, 1), (1, 2)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compiler", ["none", "cuda_graph"])
def test_a_gpu(compiler: str) -> None:
    with jackfield.load("demo", device_map="cuda", compile=compiler) as engine:
        plain = engine.generate("Once upon a time", max_new_tokens=12)
        with engine.trace() as trace:
            found = engine.generate("Once upon a time", max_new_tokens=12)
    assert found[0].token_ids == plain[0].token_ids
    totals = assert_adds_up(trace.record)
    assert totals.rows["steps", "forward"].device > 0
    assert trace.record.device == "cuda:0"


def test_a_model_on_several_devices_has_the_hosts_times_only() -> None:
    model = build("llama")
    model.lm_head.to("meta")
    clock, said = device.device_of(model)
    assert (clock, said) == (None, [])

    class Spread:
        def parameters(self) -> Any:
            for name in ("cuda:0", "cuda:1"):
                yield type("P", (), {"device": torch.device(name)})

    clock, (note,) = device.device_of(Spread())
    assert clock is None
    assert "the model is on cuda:0, cuda:1: times are the host's" in note

"""Ranks speak and find out about one another: over real sockets, without a model."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackfield import api
from jackfield.contracts import KVCache, ModelInputs, Sequence, Settings, Step, Tokens
from jackfield.contracts.sequences import ScheduledSequence
from jackfield.demo import MODEL_PATH
from jackfield.engine.following import Replay
from jackfield.engine.leading import SharedCache, shared_forward
from jackfield.errors import ExecutionError, RanksError, UsageError
from jackfield.parallel import processes
from jackfield.parallel import ranks as module
from jackfield.parallel.processes import Processes
from jackfield.parallel.ranks import Follower, Leader
from jackfield.parallel.wire import Wire
from jackfield.parallel.world import world_of

_made: list[Leader | Follower] = []


def pair(ended: Any = lambda rank: None) -> tuple[Leader, Follower]:
    here, there = socket.socketpair()
    leader, follower = Leader({1: Wire(here)}, ended), Follower(1, 2, Wire(there))
    _made.extend((leader, follower))
    return leader, follower


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


@pytest.fixture
def both() -> tuple[Leader, Follower]:
    return pair()


@pytest.mark.parametrize("message", [[], {"a": "ü" * 70_000}, [["step", [[1, 0, 3, []]]]], 1.5])
def test_a_message_comes_as_it_was_sent(message: Any) -> None:
    here, there = map(Wire, socket.socketpair())
    sender = threading.Thread(target=here.send, args=(message,))
    sender.start()
    assert there.receive(5) == message
    sender.join()
    here.close()
    with pytest.raises(EOFError):
        there.receive(5)
    there.close()


def test_every_rank_has_the_records_of_all(both: tuple[Leader, Follower]) -> None:
    leader, follower = both
    told: list[Any] = []
    other = threading.Thread(target=lambda: told.extend(follower.exchange({"rank": 1})))
    other.start()
    assert leader.exchange({"rank": 0}) == [{"rank": 0}, {"rank": 1}]
    other.join()
    assert told == [{"rank": 0}, {"rank": 1}]


def test_a_rank_that_fails_while_it_starts_is_told_by_number(
    both: tuple[Leader, Follower],
) -> None:
    leader, follower = both
    follower.fail("CheckpointError: no such folder")
    with pytest.raises(RanksError, match="rank 1: CheckpointError: no such folder"):
        leader.exchange("record")


def test_rank_0_that_fails_while_it_starts_ends_the_others(both: tuple[Leader, Follower]) -> None:
    leader, follower = both
    leader.fail("rank 0: MemoryError")
    with pytest.raises(RanksError, match="rank 0: MemoryError"):
        follower.exchange("record")


def test_a_rank_that_ends_is_noticed_at_once_and_for_ever() -> None:
    leader, follower = pair(lambda rank: "by SIGKILL")
    leader.watch()
    follower.close()
    begin = time.monotonic()
    while leader.cause is None and time.monotonic() - begin < 5:
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(RanksError, match=r"rank 1 of the 2 .* has ended \(by SIGKILL\); load"):
            leader.send([])
    leader.close()


def test_another_rank_ends_its_process_where_rank_0_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, follower = pair()
    codes: list[int] = []
    monkeypatch.setattr(module, "LEAVE_WITHIN", 0.05)
    monkeypatch.setattr(module.os, "_exit", codes.append)
    follower.watch()
    leader.send([["forget"]])
    assert follower.next() == [["forget"]]
    leader._wires[1].close()  # as the kernel does for a process that was killed
    with pytest.raises(RanksError, match="rank 0 has ended"):
        follower.next()
    begin = time.monotonic()
    while not codes and time.monotonic() - begin < 5:
        time.sleep(0.01)
    assert codes == [1]


def test_another_rank_goes_home_when_rank_0_closes(both: tuple[Leader, Follower]) -> None:
    leader, follower = both
    leader.watch()
    follower.watch()
    threading.Thread(target=lambda: (follower.next(), follower.close())).start()
    leader.close()
    assert leader.cause is None


class Pages(KVCache):
    """Keeps what it was told, as text, and finds the first token of every sequence cached."""

    continuous = True

    def __init__(self, finds: int = 1) -> None:
        self.finds = finds
        self.told: list[str] = []

    def note(self, what: str, *sequences: Sequence, more: Any = "") -> None:
        seen = [(s.id, list(s.tokens), s.num_cached, s.preemptions) for s in sequences]
        self.told.append(f"{what} {seen} {more}")

    def admit(self, sequence: Sequence) -> bool:
        sequence.num_cached = min(self.finds, len(sequence.tokens) - 1)
        self.note("admit", sequence, more=(sequence.prompt_length, sequence.settings))
        return True

    def prepare(self, step: Step) -> ModelInputs:
        fed = [(i.start, i.num_tokens, list(i.drafts), i.token_ids) for i in step.scheduled]
        self.note("prepare", *(i.sequence for i in step.scheduled), more=fed)
        return ModelInputs({}, len(step.scheduled))

    def commit(self, step: Step, kept: Any) -> None:
        for item, count in zip(step.scheduled, kept, strict=True):
            item.sequence.num_cached = item.start + count
        self.note("commit", *(i.sequence for i in step.scheduled), more=list(kept))

    def release(self, sequences: Any) -> None:
        self.note("release", *sequences)

    def fork(self, copies: Any, dropped: Any) -> None:
        for source, into in copies:
            into.num_cached = source.num_cached
        self.note("fork", *(one for both in copies for one in both), *dropped)

    def forget(self) -> None:
        self.told.append("forget")


def story(cache: KVCache, forward: Any) -> None:
    """Two texts, drafts, a preemption, a fork and the end, as a loop would tell them."""
    plain = Settings(8, eos_token_ids=(2,), stop_strings=("x",), cache_salt="s", seed=3)
    functions = plain._replace(logits_processor=(print,), sequence_bias={(1,): 2.0})
    one, two = Sequence(1, [5, 6, 7], plain), Sequence(2, [8, 9], functions, sample=1)
    three = Sequence(3, [5, 6, 7], plain)

    def step(*fed: tuple[Sequence, int, tuple[int, ...]], kept: list[int]) -> None:
        items = [ScheduledSequence(s, s.num_cached, n, drafts) for s, n, drafts in fed]
        forward(cache.prepare(Step(items)))
        cache.commit(Step(items), kept)

    assert cache.admit(one)
    assert cache.admit(two)
    step((one, 2, ()), (two, 1, ()), kept=[2, 1])
    list.append(one.tokens, 11)
    step((one, 1, (12, 13)), kept=[2])
    list.extend(one.tokens, [12, 14])
    cache.preempt(two)
    two.preemptions = 1
    list.append(two.tokens, 4)
    assert cache.admit(two)
    three.tokens = Tokens([5, 6, 7, 11, 12, 1])
    cache.fork([(one, three)], [two])
    step((three, 1, ()), (one, 1, ()), kept=[1, 1])
    cache.release([one, two])
    cache.forget()
    cache.release([three, Sequence(9, [1], plain)])


def played(here: Pages, there: Pages) -> tuple[Leader, list[Any]]:
    leader, follower = pair()
    steps: list[Any] = []
    replay = Replay(there, steps.append)
    shared = SharedCache(here, leader)
    story(shared, shared_forward(steps.append, shared, leader))
    leader._each({"end": True})
    follower.watch()
    try:
        while (acts := follower.next()) is not None:
            replay.play(acts)
    finally:
        leader.close()
        follower.close()
    return leader, steps


def test_another_rank_does_to_its_cache_what_rank_0_did_to_its_own() -> None:
    here, there, alone = Pages(), Pages(), Pages()
    leader, steps = played(here, there)
    story(alone, lambda inputs: None)
    assert here.told == alone.told
    blank = [line.replace("<built-in function print>", "") for line in alone.told]
    known = [
        line.replace(", (9, [1], 0, 0)", "")
        .replace("logits_processor=(,)", "logits_processor=()")
        .replace("{(1,): 2.0}", "mappingproxy({})")
        for line in blank
    ]
    assert there.told == known
    assert len(steps) == 6
    assert leader.sent == 4  # a message a step, and one at the end


def test_the_cache_of_every_rank_knows_how_much_a_step_feeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"cache_implementation": "paged", "prefill_chunk_size": 5}
    found = api.prepare(MODEL_PATH, **asked)
    with found.load() as engine:
        assert engine._bound.cache.inner._room._chunk == 5
    bound: list[Any] = []
    monkeypatch.setattr(api, "together", lambda *_: nullcontext(pair()[1]))
    monkeypatch.setattr(api, "read_weights", lambda *_: engine.model)
    monkeypatch.setattr(api, "follow", lambda model, _: bound.append(model) or sys.exit())
    for name in ("agree", "prove", "agreed_bytes"):
        monkeypatch.setattr(api, name, lambda *_: None)
    with pytest.raises(SystemExit):
        replace(found, job=replace(found.job, shard=object())).load()
    assert bound[0].cache.inner._room._chunk == 5
    bound[0].close()


def test_a_cache_that_does_otherwise_is_named() -> None:
    with pytest.raises(ExecutionError, match="on rank 0 has 1 tokens of request 1, and here it"):
        played(Pages(), Pages(finds=2))


def test_a_step_that_fails_on_rank_0_ends_the_others() -> None:
    leader, follower = pair()
    leader._lost.set()  # nobody ended
    shared = SharedCache(Pages(), leader)

    def broken(inputs: ModelInputs) -> Any:
        raise ValueError("no memory")

    with pytest.raises(RanksError, match="rank 0: no memory; load the model again"):
        story(shared, shared_forward(broken, shared, leader))
    follower.watch()
    follower.next()
    with pytest.raises(RanksError, match="no memory"):
        follower.next()
    shared.release([])  # after the failure everything is given back, and nobody is told
    follower.close()


def test_beams_that_are_given_back_once_for_each_of_them_are_released_once(
    both: tuple[Leader, Follower],
) -> None:
    leader, follower = both
    shared, one = SharedCache(Pages(), leader), Sequence(1, [5, 6], Settings(8))
    shared.admit(one)
    shared.release([one, one])
    assert [act for act in follower._wire.receive(5) if act[0] == "release"] == [["release", [1]]]


TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host", "MASTER_PORT": "123",
}  # fmt: skip


def test_what_torchrun_says_is_read() -> None:
    assert world_of({}) is None
    world = world_of(TORCHRUN)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 4, 1, 2)
    assert (world.address, world.port) == ("host", 123)
    assert world_of({"RANK": "0", "WORLD_SIZE": "1"}) == replace(
        world, rank=0, size=1, local_rank=0, local_size=1, address="127.0.0.1", port=29500
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"RANK": "4"}, "RANK=4 is not one of WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is not one of"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' is not a"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=1 is not one of LOCAL_WORLD_SIZE=0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is not one of"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK='' is not a"),
        ({"MASTER_PORT": "99999"}, "MASTER_ADDR='host' and MASTER_PORT=99999 are no place"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 are no place"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR='' and MASTER_PORT=123 are no place"),
    ],
)
def test_nonsense_of_torchrun_is_refused(changes: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        world_of({**TORCHRUN, **changes})


def test_a_message_is_json_and_small() -> None:
    """A decode step of one request: about a hundred bytes."""
    leader, follower = pair()
    shared = SharedCache(Pages(), leader)
    one = Sequence(123_456, [5, 6, 7], Settings(800))
    shared.admit(one)
    shared.send()
    follower._wire.receive(5)
    for _ in range(2):
        step = Step([ScheduledSequence(one, one.num_cached, 1)])
        shared.prepare(step)
        shared.send()
        message = follower._wire.receive(5)
        shared.commit(step, [1])
        list.append(one.tokens, 151_935)
    assert len(json.dumps(message)) < 120


class Sleeping:
    """Starts processes that know nothing of ending, `most` of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 9) -> None:
        self.most, self.processes = most, list[subprocess.Popen[bytes]]()
        monkeypatch.setattr(processes, "_END_WITHIN", 0.4)
        monkeypatch.setattr(processes, "_started", self.start)

    def start(self, *_: Any) -> subprocess.Popen[bytes]:
        if len(self.processes) == self.most:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        run = [sys.executable, "-S", "-c", "import time; print('here', flush=True); time.sleep(60)"]
        one = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(one)
        return one

    def ended(self) -> bool:
        return all(one.poll() is not None for one in self.processes)


def test_processes_that_do_not_end_are_ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = Sleeping(monkeypatch)
    started = Processes({}, 5, 1, None)
    begin = time.monotonic()
    started.close()
    assert time.monotonic() - begin < 1.2  # and not once for each of four
    assert sleeping.ended()


def test_a_second_ctrl_c_ends_processes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = Sleeping(monkeypatch)
    started = Processes({}, 3, 1, None)

    def interrupted(seconds: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(sleeping.processes[0], "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started.close()
    assert sleeping.ended()


def test_where_one_cannot_be_started_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = Sleeping(monkeypatch, most=2)
    with pytest.raises(ExecutionError, match="cannot start 3 more processes: Resource temporarily"):
        Processes({}, 4, 1, None)
    assert len(sleeping.processes) == 2
    assert sleeping.ended()


def test_a_process_ends_where_rank_0_is_killed_before_it_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = "import time\ndef load(**given):\n    print(given, flush=True)\n    time.sleep(60)\n"
    (tmp_path / "jackfield.py").write_text(load)  # stands for all that takes long
    monkeypatch.syspath_prepend(tmp_path)
    started = Processes({"model": "x" * 100_000 + "end"}, 2, 1, None)
    one, begin = started._started[1], time.monotonic()
    while 1 not in started.lines and time.monotonic() - begin < 20:
        time.sleep(0.01)
    assert started.lines[1].endswith("end'}")
    assert one.poll() is None
    assert one.stdin is not None
    one.stdin.close()  # as the kernel does for a process that was killed
    assert one.wait(10) == 1


def test_a_step_that_waited_too_long_blames_the_others(
    both: tuple[Leader, Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, _ = both
    leader._lost.set()  # nobody ended
    monkeypatch.setattr(module, "STEP_WITHIN", 0.05)

    def stopped(inputs: ModelInputs) -> Any:
        time.sleep(0.06)
        raise RuntimeError("Timed out waiting 50ms")

    shared = SharedCache(Pages(), leader)
    with pytest.raises(RanksError, match=r"rank 1 did not answer within 0.05 s in a step \(rank 0"):
        story(shared, shared_forward(stopped, shared, leader))


def test_what_others_print_harms_nobody_where_it_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Sleeping(monkeypatch)
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    started = Processes({}, 2, 1, None)
    begin = time.monotonic()
    while 1 not in started.lines and time.monotonic() - begin < 10:
        time.sleep(0.01)
    started.close()
    assert started.lines == {1: "here"}

"""An engine whose steps a test takes or holds itself, so that things happen at steps it names."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from families import prompts

from jackfield import Engine
from jackfield.contracts import KVCache, Sequence, Step
from jackfield.engine.loop import Loop


class Gate:
    """Holds every forward call of an engine until it is let through."""

    def __init__(self, engine: Engine) -> None:
        self._entered, self._passes = threading.Semaphore(0), threading.Semaphore(0)
        self._engine, self._open = engine, False
        inner = engine._loop.forward

        def forward(inputs: Any) -> Any:
            self._entered.release()
            if not self._open:
                assert self._passes.acquire(timeout=60)
            return inner(inputs)

        engine._loop.forward = forward

    def inside(self) -> None:
        """Wait until one more step has begun."""
        assert self._entered.acquire(timeout=60)

    def let(self) -> None:
        """Let this step end, and wait until the next has begun."""
        self.admit()
        self.inside()

    def admit(self) -> None:
        """Let one more step through, whenever it comes."""
        self._passes.release()

    def close(self) -> None:
        """Close the engine in the middle of the step that is held."""
        worker = self._engine._worker
        closing = threading.Thread(target=self._engine.close)
        closing.start()
        with worker._changed:
            assert worker._changed.wait_for(lambda: worker.closed, 60)
        self.lift()
        closing.join(60)

    def lift(self) -> None:
        self._open = True
        self.admit()


def age(engine: Engine, sequence: Sequence, seconds: float) -> None:
    """Have the sequence come so many seconds before it did, which no step may see happen."""
    sequence.called -= seconds
    sequence.started -= seconds
    timed = engine._loop._timed
    if sequence in timed:
        timed.discard(sequence)
        timed.push(sequence, sequence.deadline)


def awaited(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, and what comes of it awaited in an event loop of its own."""

    def act(*given: Any, **named: Any) -> Any:
        async def wait() -> Any:
            return await call(*given, **named)

        return asyncio.run(wait())

    return act


def ways(engine: Engine) -> list[Callable[..., Any]]:
    """The ways to ask for one text, of which each raises where it is called."""
    first = awaited(lambda *given, **named: anext(engine.astream(*given, **named)))
    return [engine.generate, engine.submit, engine.stream, awaited(engine.asubmit), first]


class Arrival:
    """A prompt that comes before step `at`, with settings of its own."""

    def __init__(self, at: int, prompt: Any, **settings: Any) -> None:
        self.at = at
        self.prompt = list(prompt) if isinstance(prompt, Seq) else prompt
        self.settings: Mapping[str, Any] = settings


def drive(
    engine: Engine, arrivals: Seq[Arrival], after: Callable[[Loop], None] | None = None
) -> list[list[Sequence]]:
    """Run all to their end; the sequences of each arrival. `after` looks at every step."""
    loop, worker = engine._loop, engine._worker
    with worker._changed:  # its thread takes steps for as long as it lingers
        assert worker._changed.wait_for(lambda: worker._thread is None, 60)
    coming = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at)
    made: dict[int, list[Sequence]] = {}
    for clock in itertools.count():
        while coming and arrivals[coming[0]].at <= clock:
            number = coming.pop(0)
            one = arrivals[number]
            made[number] = engine._intake.sequences(one.prompt, one.settings, streams=False)
            for sequence in made[number]:
                loop.submit(sequence)
        if loop.running or loop.waiting:
            loop.step()
            if after is not None:
                after(loop)
        elif not coming:
            return [made[number] for number in range(len(arrivals))]
    raise AssertionError


def tokens(sequences: list[list[Sequence]]) -> list[list[int]]:
    """The new tokens of arrivals that have one sequence each."""
    return [sequence.new_tokens for (sequence,) in sequences]


def recorded(cache: KVCache, monkeypatch: Any) -> list[Step]:
    """Every step that the cache is asked to lay out from now on."""
    steps: list[Step] = []
    inner = cache.prepare

    def prepare(step: Step) -> Any:
        steps.append(step)
        return inner(step)

    monkeypatch.setattr(cache, "prepare", prepare)
    return steps


def compiled(engine: Engine) -> Any:
    return engine.report()["compiler"]


def arrivals(count: int, seed: int = 0) -> list[Arrival]:
    """Requests of mixed lengths that come in three waves."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 40) for _ in range(count)]
    return [
        Arrival(4 * (i % 3), prompt, max_new_tokens=chance.randint(1, 14))
        for i, prompt in enumerate(prompts(tuple(lengths)))
    ]

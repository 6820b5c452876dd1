"""Requests of all kinds come, are cancelled and run late in a pool that is too small for them."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from drafting import ASSISTED, LOOKUP, draft_of
from driven import age
from families import STATES_APART, WINDOW, build, oracle, prompts
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from samples import share
from storming import Stepped

import jackfield
from jackfield.contracts import Sequence
from jackfield.errors import CacheFullError

TEXTS = prompts(tuple(1 + n % (3 * WINDOW) for n in range(12))) + [
    [*prompts((WINDOW,))[0], *end] for end in prompts((1, 3, 5))
]  # the last three begin alike
MOST = 12
STATES = ("lfm2", "qwen3-next") if STATES_APART else ()
SCALE = 1.5
LONG = 100  # seconds: no deadline passes by itself

model_of = functools.cache(build)
plain = functools.cache(build)  # runs in no engine


@functools.cache
def alone(family: str, text: int) -> list[int]:
    return oracle(plain(family), TEXTS[text], MOST)


@functools.cache
def led_away(family: str, text: int, negative: int) -> list[int]:
    ids = torch.tensor([TEXTS[text]])
    found = plain(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST, do_sample=False,
        guidance_scale=SCALE, negative_prompt_ids=torch.tensor([TEXTS[negative]]),
    )  # fmt: skip
    return found[0, ids.shape[1] :].tolist()


class Storm(Stepped):
    """The loop, stepped by hand; what a thread does with it is another test."""

    @initialize(
        family=st.sampled_from(["llama", "mistral", "gemma3", *STATES]),
        chunk=st.sampled_from([None, 1, 5]),
        swap=st.booleans(),
        sharing=st.booleans(),
        scheduler=st.sampled_from(["fifo?patience=0.01", "fifo", "short-first?patience=0.1"]),
        size=st.sampled_from([2, 8]),
        deterministic=st.booleans(),
        assistant=st.sampled_from(["paged?page_size=3&num_tokens=30", "paged", "dynamic"]),
    )
    def begin(self, family: str, chunk: int | None, swap: bool, sharing: bool, scheduler: str,
              size: int, deterministic: bool, assistant: str) -> None:  # fmt: skip
        self.family, swap = family, swap and family not in STATES
        deterministic = deterministic and family not in STATES
        plain = deterministic or family in STATES
        self.decodings = [None] if plain else ["sample", "look", "assist"]
        drafting: dict[str, Any] = {} if plain else {
            "decoding": {"look": LOOKUP, "assist": ASSISTED},
            "assistant_model": draft_of("llama"),
            "assistant": {"cache_implementation": assistant},
        }  # fmt: skip
        self.budget = size + (chunk or 64) if deterministic else 16
        engine = jackfield.load(
            model_of(family),
            cache_implementation=f"paged?page_size=3&num_tokens=42&swap={swap}"
            f"&prefix_sharing={sharing and not deterministic}",
            scheduler=scheduler,
            prefill_chunk_size=chunk,
            max_batch_size=size,
            max_batch_tokens=self.budget,
            deterministic=deterministic,
            **drafting,
        )
        self.drive(engine)
        self.ended: set[int] = set()

    @rule(
        text=st.integers(0, len(TEXTS) - 1),
        count=st.integers(1, MOST),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([None, LONG]),
        decoding=st.integers(0, 2),
    )
    def submit(
        self, text: int, count: int, priority: int, deadline: float | None, decoding: int
    ) -> None:
        asked = {"max_new_tokens": count, "priority": priority, "deadline": deadline,
                 "decoding": self.decodings[decoding % len(self.decodings)]}  # fmt: skip
        sequence = self.engine._intake.sequence(TEXTS[text], asked, streams=False)
        self.open[sequence.id] = (sequence, text, None)
        self.loop.submit(sequence)

    @rule(text=st.integers(0, len(TEXTS) - 1), count=st.integers(1, MOST))
    def submit_samples(self, text: int, count: int) -> None:
        """Samples that all take the best: three of one greedy text, the first reads for all."""
        asked = {"max_new_tokens": count, "num_return_sequences": 3, "do_sample": True, "top_k": 1}
        for sequence in self.engine._intake.sequences(TEXTS[text], asked, streams=False):
            self.open[sequence.id] = (sequence, text, None)
            self.loop.submit(sequence)

    @rule(
        text=st.integers(0, len(TEXTS) - 1),
        negative=st.integers(0, len(TEXTS) - 1),
        count=st.integers(1, MOST),
        priority=st.integers(-1, 1),
        decoding=st.integers(0, 2),
    )
    def submit_guided(
        self, text: int, negative: int, count: int, priority: int, decoding: int
    ) -> None:
        """Two sequences, if both fit into the pool when they are as long as can be."""
        asked = {"max_new_tokens": count, "priority": priority, "guidance_scale": SCALE,
                 "negative_prompt": TEXTS[negative],
                 "decoding": self.decodings[decoding % len(self.decodings)]}  # fmt: skip
        try:
            sequence = self.engine._intake.sequence(TEXTS[text], asked, streams=False)
        except CacheFullError:
            return
        self.open[sequence.id] = (sequence, text, negative)
        self.loop.submit(sequence)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        (event,) = self.loop.cancel(self.open[number][0])
        self.end(event.sequence)
        assert self.loop.cancel(event.sequence) == []

    @precondition(lambda self: any(s.deadline is not None for s, _, _ in self.open.values()))
    @rule(data=st.data())
    def let_a_deadline_pass(self, data: Any) -> None:
        timed = sorted(n for n, (s, _, _) in self.open.items() if s.deadline is not None)
        age(self.engine, self.open[data.draw(st.sampled_from(timed))][0], 2 * LONG)

    @precondition(lambda self: self.loop.running or self.loop.waiting)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not (self.loop.running or self.loop.waiting):
                return
            before = len(self.steps)
            cancelled = set(self.ended)
            for event in self.loop.step():
                if event.sequence.finish_reason is not None:
                    self.end(event.sequence)
                    if event.sequence.finish_reason == "cancelled":
                        assert event.sequence.error == f"its deadline of {LONG} s passed"
            for step in self.steps[before:]:
                assert 0 < sum(item.num_tokens for item in step.scheduled) <= self.budget
                fed = {item.sequence.id for item in step.scheduled}
                assert not fed & cancelled

    def end(self, sequence: Sequence) -> None:
        _, text, negative = self.open.pop(sequence.id)
        self.ended.update(one.id for one in sequence.members)
        guided = negative is not None
        expected = led_away(self.family, text, negative) if guided else alone(self.family, text)
        if sequence.finish_reason == "length":
            assert sequence.new_tokens == expected[: sequence.settings.max_new_tokens]
        else:
            assert sequence.finish_reason == "cancelled"
            assert sequence.new_tokens == expected[: sequence.num_new]

    @precondition(lambda self: self.open)
    @rule()
    def finish(self) -> None:
        super().finish()

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "engine"):
            return
        held = {s.id for s in self.loop.running}
        for group in self.loop.cache.groups.values():  # type: ignore[attr-defined]
            assert set(group.tables) == held
            if not held:
                assert group.allocator.num_free == group.allocator.capacity
        usage = self.loop.cache.usage()
        assert usage is not None
        waiting = {one.id for s in self.loop.waiting for one in s.members}
        assert set(self.loop.cache._swapped._waiting) <= waiting  # type: ignore[attr-defined]
        assert held | waiting == {one.id for s, _, _ in self.open.values() for one in s.members}
        for sequence, _, negative in self.open.values():
            pair = [one for one in sequence.members if one.id in held]
            assert negative is None or len(pair) != 1
            assert [one.new_tokens for one in pair] == [sequence.new_tokens] * len(pair)
        assert set(self.loop._timed._held) <= set(self.open)
        if self.family in STATES:
            cache: Any = self.loop.cache
            for layer in cache._layers:
                assert {*layer._apart, *layer._members} <= held
        self.nothing_of_drafts_leaks()

    def nothing_of_drafts_leaks(self) -> None:
        """Neither an index, nor a copy, nor a page of the draft model stays of one that ended."""
        strategies = self.loop.decoding.strategies
        if "look" not in strategies:
            return
        assert set(strategies["look"]._inner._indexes) <= set(self.open)  # type: ignore[attr-defined]
        assist = strategies["assist"]._inner  # type: ignore[attr-defined]
        assert set(assist._last) <= set(self.open)
        assert set(assist._lengths) <= set(self.open)
        copies = set(assist._assistant._copies)
        assert copies <= set(self.open)
        cache = assist._assistant._cache
        if cache.continuous:
            for group in cache.groups.values():
                assert set(group.tables) == copies
                if not copies:
                    assert group.allocator.num_free == group.allocator.capacity
        else:
            assert {row.id for row in cache._rows} == copies


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=share(0.4),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_storm_through_the_thread_leaves_nothing_behind() -> None:
    """Cancellations race with steps here; threads and pages must be back where they were."""
    expected = [alone("gemma3", text) for text in range(len(TEXTS))]
    before = threading.active_count()
    with jackfield.load(
        model_of("gemma3"), cache_implementation="paged?page_size=3&num_tokens=42&swap=True"
    ) as engine:
        wrong: list[Any] = []

        def client(number: int) -> None:
            for turn in range(12):
                text = (5 * number + turn) % len(TEXTS)
                request = engine.submit(TEXTS[text], max_new_tokens=MOST, priority=turn % 3)
                if turn % 3 == 0:
                    request.cancel()
                elif turn % 3 == 1:
                    next(iter(request))
                    request.cancel()
                found = request.result(120)
                right = expected[text] if turn % 3 == 2 else expected[text][: len(found.token_ids)]
                if found.token_ids != right:
                    wrong.append((number, turn, found))

        threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert wrong == []
        worker = engine._worker
        with worker._changed:
            assert worker._changed.wait_for(lambda: worker._thread is None, 60)
        figures = engine.statistics()
        assert (figures.running, figures.waiting, figures.cache.pages_used) == (0, 0, 0)
        assert sum(figures.finished.values()) == 6 * 12
        deadline = threading.Event()
        for _ in range(200):  # its last lines run after it has said that it ends
            if threading.active_count() <= before:
                break
            deadline.wait(0.01)
        assert threading.active_count() == before

"""Searches and plain requests come, are cancelled and run late in a pool that is too small."""

from __future__ import annotations

import functools
from typing import Any

from beams import ENDS, Found, assert_same, diverse, drawn, model_of, plain, search, texts
from drafting import LOOKUP
from driven import age
from families import oracle, prompts
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from samples import share
from storming import Stepped

import jackfield
from jackfield.contracts import Sequence, Step

TEXTS = prompts(tuple(range(1, 7))) + [
    [*prompts((4,))[0], *end] for end in prompts((1, 2))
]  # the last two begin alike
MOST = 14
SIZE = 14
LONG = 100  # seconds: no deadline passes by itself


@functools.cache
def alone(family: str, text: int) -> list[int]:
    return oracle(plain(family), TEXTS[text], MOST)


#: Ways to search: what is asked of one beside `num_beams`.
WAYS: dict[str, dict[str, Any]] = {
    "best": {},
    "drawn": {"do_sample": True, "temperature": 1.4, "seed": 5},
    "groups": {"num_beam_groups": 2, "diversity_penalty": 0.6},
}


@functools.cache
def searched(family: str, text: int, beams: int, answers: int, count: int, way: str) -> list[Found]:
    asked: dict[str, Any] = {"num_beams": beams, "num_return_sequences": answers,
                             "max_new_tokens": count, "eos_token_id": ENDS}  # fmt: skip
    if way == "groups":
        return diverse(family, TEXTS[text], **asked, **WAYS[way])
    if way == "drawn":
        return drawn(family, TEXTS[text], **asked, **WAYS[way])
    return search(plain(family), TEXTS[text], **asked)


class Storm(Stepped):
    """The loop, stepped by hand."""

    @initialize(
        family=st.sampled_from(["llama", "mistral", "gemma3"]),
        cache=st.sampled_from(["paged", "paged", "dynamic"]),
        chunk=st.sampled_from([None, 1, 5]),
        swap=st.booleans(),
        sharing=st.booleans(),
        scheduler=st.sampled_from(["fifo?patience=0.01", "short-first?patience=0.1"]),
    )
    def begin(
        self, family: str, cache: str, chunk: int | None, swap: bool, sharing: bool, scheduler: str
    ) -> None:
        self.family = family
        paged = f"paged?page_size=3&num_tokens=84&swap={swap}&prefix_sharing={sharing}"
        rollback = cache == "paged" or family == "llama"  # holes and windows do not go together
        decoding = {"sample": "sample", "beam": "beam"} | ({"look": LOOKUP} if rollback else {})
        self.plain = [d for d in decoding if d != "beam"]
        engine = jackfield.load(
            model_of(family),
            decoding=decoding,
            cache_implementation=paged if cache == "paged" else cache,
            scheduler=scheduler,
            prefill_chunk_size=chunk,
            max_batch_size=SIZE,
        )
        self.drive(engine)

    def add(self, text: int, asked: dict[str, Any], way: str = "") -> None:
        made = self.engine._intake.sequences(TEXTS[text], asked, streams=False)
        self.open[made[0].id] = (made, text, way)
        for sequence in made:
            self.loop.submit(sequence)

    @rule(
        text=st.integers(0, len(TEXTS) - 1),
        count=st.integers(1, MOST),
        beams=st.integers(2, 4),
        answers=st.integers(1, 2),
        times=st.integers(1, 4),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([None, LONG]),
        way=st.sampled_from(sorted(WAYS)),
    )
    def submit_search(
        self,
        text: int,
        count: int,
        beams: int,
        answers: int,
        times: int,
        priority: int,
        deadline: float | None,
        way: str,
    ) -> None:
        beams = beams // 2 * 2 if way == "groups" else beams
        asked = {**WAYS[way], "num_beams": beams, "num_return_sequences": answers,
                 "max_new_tokens": count, "deadline": deadline, "eos_token_id": ENDS,
                 "priority": priority}  # fmt: skip
        for n in range(times):
            self.add((text + n) % len(TEXTS), asked, way)

    @rule(text=st.integers(0, len(TEXTS) - 1), count=st.integers(1, MOST), way=st.integers(0, 1))
    def submit_plain(self, text: int, count: int, way: int) -> None:
        decoding = self.plain[way % len(self.plain)]
        self.add(text, {"max_new_tokens": count, "decoding": decoding})

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        made, _, _ = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        events = self.loop.cancel(data.draw(st.sampled_from(made)))
        assert [event.sequence for event in events] == made
        self.end(made)

    @precondition(lambda self: any(m[0].deadline is not None for m, _, _ in self.open.values()))
    @rule(data=st.data())
    def let_a_deadline_pass(self, data: Any) -> None:
        timed = sorted(n for n, (m, _, _) in self.open.items() if m[0].deadline is not None)
        made, _, _ = self.open[data.draw(st.sampled_from(timed))]
        age(self.engine, data.draw(st.sampled_from(made)), 2 * LONG)

    @precondition(lambda self: self.loop.running or self.loop.waiting)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not (self.loop.running or self.loop.waiting):
                return
            before = len(self.steps)
            ended = {event.sequence.id for event in self.loop.step()
                     if event.sequence.finish_reason is not None}  # fmt: skip
            for number in sorted(ended & set(self.open)):
                made, _, _ = self.open[number]
                assert {s.id for s in made} <= ended
                self.end(made)
            for step in self.steps[before:]:
                self.check(step)

    def check(self, step: Step) -> None:
        """Beams are fed the last of their tokens in the same step, or none of them is."""
        fed = [item.sequence.id for item in step.scheduled]
        assert len(fed) == len(set(fed)) <= SIZE
        for group in {s.group for s in self.loop.running if s.group is not None}:
            assert len({len(beam.tokens) for beam in group.beams}) == 1
            alike = group.settings.beams.num_beam_groups or 1  # a text may be in each group once
            assert len({tuple(b.tokens) for b in group.beams}) * alike >= len(group.beams)

    def end(self, made: list[Sequence]) -> None:
        _, text, way = self.open.pop(made[0].id)
        asked = made[0].settings
        group = made[0].group
        cancelled = {s.finish_reason for s in made} == {"cancelled"}
        if group is None:
            expected = alone(self.family, text)[: asked.max_new_tokens]
            assert made[0].new_tokens == (expected[: made[0].num_new] if cancelled else expected)
        elif not cancelled:
            expected = searched(
                self.family, text, group.width, len(made), asked.max_new_tokens, way
            )
            assert_same(texts(made), expected)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "engine"):
            return
        leading = {beam.group.members[0].id if beam.group else beam.id for beam in
                   [*self.loop.running, *self.loop.waiting]}  # fmt: skip
        assert leading == set(self.open)
        usage = self.loop.cache.usage()
        if usage is not None and not self.open:
            assert (usage.pages_used, usage.swapped) == (0, 0)

    def finish(self) -> None:
        super().finish()
        self.nothing_is_lost()


Storm.TestCase.settings = settings(
    max_examples=share(0.5), stateful_step_count=30, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestBeamStorm = Storm.TestCase

"""``beam``: what it is asked, how it ends, what fails, and what it leaves behind."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beams import BOTH, COUNT, ENDS, LENGTHS, assert_same, model_of, plain, references, texts
from driven import Arrival, age, drive
from families import VOCAB, build, character_tokenizer, config_of, oracle, prompts

import jackfield
from jackfield import contracts
from jackfield.contracts import (
    Continuation,
    Decision,
    Hypothesis,
    Schedule,
    Search,
    Sequence,
    Settings,
)
from jackfield.engine.checked_schedule import CheckedSchedule
from jackfield.engine.checked_search import checked
from jackfield.engine.decoder import Decoder
from jackfield.engine.sequences import RunningGroup, RunningSequence
from jackfield.errors import (
    CacheFullError,
    JackfieldError,
    OptionError,
    PlanError,
    PluginError,
    SettingsError,
)
from jackfield_plugins.decoding.beam import BeamOptions, BeamSearch

PROMPT = prompts(LENGTHS)[0]


def load(**arguments: Any) -> jackfield.Engine:
    return jackfield.load(model_of("llama"), **{"decoding": BOTH, **arguments})


def assert_mistake(error: type[JackfieldError], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"num_beams": 1, "decoding": "beam"}, "num_beams must be at least 2, not 1"),
        ({"num_beams": 0}, "at least 2, not 0"),
        ({"num_beams": "4"}, "whole number, not '4'"),
        ({"num_beams": 2.0}, r"whole number, not 2\.0"),
        ({"num_beams": True}, "num_beams must be a whole number, not True"),
        ({"num_beams": VOCAB + 1}, "num_beams=121 is more than the vocabulary of 120"),
        ({"num_beams": 33}, "max_batch_size=32; lower it, or load with a larger"),
        ({"num_beams": 2, "num_return_sequences": 3}, "sequences=3 is more than num_beams=2"),
        ({"num_beams": 2, "length_penalty": "1"}, "length_penalty must be a number, not '1'"),
        ({"num_beams": 2, "length_penalty": math.nan}, "finite number"),
        ({"num_beams": 2, "length_penalty": 1e6}, "length_penalty=1e.06 makes scores of 12"),
        ({"num_beams": 2, "early_stopping": "always"}, "True, False or \"never\", not 'always'"),
        ({"num_beams": 2, "early_stopping": 1}, 'True, False or "never", not 1'),
        ({"num_beams": 2, "do_sample": False, "top_k": 5}, "no effect with do_sample=False"),
        ({"num_beams": 2, "temperature": -1.0}, "temperature must be at least 0, not -1"),
        (
            {"num_beams": 2, "penalty_alpha": 0.6},
            r"'beam' does not honour penalty_alpha=0.6.*so drop it or.*\(none that is installed\)",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "'sample' does not honour penalty_alpha=0.6"),
        ({"num_beams": 2, "logprobs": 1}, "'beam' does not honour logprobs=1.*: decoding='sample'"),
        ({"num_beams": 4, "num_beam_groups": 2}, "diversity_penalty=0; set that to more than 0"),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "groups of beams.*num_beam_groups=1; raise"),
        ({"num_beams": 4, "num_beam_groups": 0}, "num_beam_groups must be at least 1, not 0"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1.0}, "penalty=-1; set that"),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 0.5}, "does not divide num_b"),
        ({"num_beams": 2, "num_beam_groups": 4, "diversity_penalty": 0.5}, "does not divide num_b"),
        ({"decoding": "beam", "num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beams=4 into"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "temperature": 0.5},
            "num_beam_groups=2 takes the best continuations, and sampling draws them",
        ),
        ({"num_beam_groups": 2}, "'sample' does not honour num_beam_groups=2.*decoding='beam'"),
        (
            {"num_beams": 2, "decoding": "sample"},
            "'sample' does not.*a decoding.*: decoding='beam'",
        ),
        ({"length_penalty": 2.0}, "'sample' does not honour length_penalty=2.0.*decoding='beam'"),
    ],
)
def test_a_mistake_in_a_request_is_one_line(asked: dict[str, Any], text: str) -> None:
    with load(max_batch_size=130 if asked.get("num_beams") == VOCAB + 1 else 32) as engine:
        call = lambda: engine.generate(PROMPT, max_new_tokens=COUNT, **asked)  # noqa: E731
        assert_mistake(SettingsError, text, call)
        assert not engine._worker._open


def test_an_engine_without_beams_says_how_to_have_them() -> None:
    with load(decoding="sample") as engine:
        assert_mistake(
            SettingsError,
            r"'sample' does not honour num_beams=4.*"
            r"jackfield\.load\(decoding=\{'sample': 'sample', 'beam': 'beam'\}\)",
            lambda: engine.generate(PROMPT, num_beams=4),
        )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"cache_implementation": "static"},
            PlanError,
            r"static.*cannot copy a sequence \(forks\)",
        ),
        ({"deterministic": True}, PlanError, "beam.*deterministic=True"),
        ({"decoding": "beam?num_beams=1"}, OptionError, "at least 2, not 1"),
        ({"decoding": "beam?length_penalty=200"}, OptionError, "from -100 to 100"),
        ({"decoding": "beam?early_stopping=maybe"}, OptionError, "one of False, True, never"),
    ],
)
def test_a_mistake_in_a_selection_is_one_line(
    arguments: dict[str, Any], error: type[JackfieldError], text: str
) -> None:
    arguments = {"decoding": BOTH, **arguments}
    assert_mistake(error, text, lambda: jackfield.plan(config_of("llama"), **arguments))
    assert_mistake(error, text, lambda: load(**arguments))


def test_a_pool_that_holds_one_text_and_not_four_is_refused_by_its_size() -> None:
    with load(cache_implementation="paged?page_size=4&num_tokens=32") as engine:
        assert engine.generate(PROMPT, max_new_tokens=COUNT)[0].finish_reason == "length"
        assert_mistake(
            CacheFullError,
            "each of 4 sequences by itself, need 64 places.*num_beams.*num_tokens=64",
            lambda: engine.generate(PROMPT, num_beams=4, max_new_tokens=COUNT),
        )
    with load(cache_implementation="paged?page_size=4&num_tokens=64") as engine:
        found = engine.generate(PROMPT, num_beams=4, max_new_tokens=COUNT)
    assert_same(texts(found), references("llama", num_beams=4)[0])


def test_who_gets_beams() -> None:
    """A request that asks for some, where any decoding has them; the default's options for it."""
    from transformers import GenerationConfig

    four, three = references("llama", num_beams=4)[0], references("llama", num_beams=3)[0]
    greedy = oracle(plain("llama"), PROMPT, COUNT)

    def one(engine: jackfield.Engine, **asked: Any) -> list[Any]:
        (found,) = engine.generate(PROMPT, max_new_tokens=COUNT, **asked)
        return [(found.token_ids, found.score)]

    with load() as engine:
        assert one(engine) == one(engine, num_beams=1) == [(greedy, None)]
        assert_same(one(engine, num_beams=4), four)
        assert_same(one(engine, decoding="beam"), four)
        assert_same(one(engine, generation_config=GenerationConfig(num_beams=3)), three)
    with load(decoding="beam?num_beams=3&early_stopping=false") as engine:
        assert_same(one(engine), three)
        assert_same(one(engine, num_beams=4), four)
        assert one(engine, num_beams=1) == one(engine, decoding="sample") == [(greedy, None)]


def test_what_a_models_own_config_asks_for() -> None:
    model = build("llama")
    model.generation_config.num_beams = 3
    model.generation_config.length_penalty = 0.5
    with jackfield.load(model, decoding=BOTH) as engine:
        found = engine.generate(PROMPT, max_new_tokens=COUNT)
        assert_same(texts(found), references("llama", num_beams=3, length_penalty=0.5)[0])
    model.generation_config.num_beams, model.generation_config.length_penalty = None, None
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    with jackfield.load(model, decoding=BOTH) as engine:
        drawn = engine.generate(PROMPT, num_beams=3, seed=5, max_new_tokens=COUNT)
        asked = {"do_sample": True, "temperature": 0.7, "seed": 5, "num_beams": 3}
        assert drawn[0].score == engine.generate(PROMPT, max_new_tokens=COUNT, **asked)[0].score
        found = engine.generate(PROMPT, num_beams=3, do_sample=False, max_new_tokens=COUNT)
        assert_same(texts(found), references("llama", num_beams=3)[0])
        assert drawn[0].token_ids != found[0].token_ids


def test_a_streamed_search_is_told_at_its_end_in_one_piece() -> None:
    with load(tokenizer=character_tokenizer()) as engine:
        asked: dict[str, Any] = {"num_beams": 3, "max_new_tokens": COUNT}
        (expected,) = engine.generate(PROMPT, **asked)
        (delta,) = engine.stream(PROMPT, **asked)
        assert (delta.text, delta.token_ids) == (expected.text, expected.token_ids)
        assert delta.completion is not None
        assert delta.completion.score == expected.score
        submitted = engine.submit(PROMPT, **asked).result(60)
        assert (submitted.text, submitted.score) == (expected.text, expected.score)

        async def awaited() -> list[jackfield.Delta]:
            return [delta async for delta in engine.astream(PROMPT, **asked)]

        assert [d.text for d in asyncio.run(awaited())] == [expected.text]
        assert_mistake(SettingsError, "num_return_sequences=2 has no single reader",
              lambda: engine.submit(PROMPT, num_return_sequences=2, **asked))  # fmt: skip


def test_reports_and_statistics_say_what_ran() -> None:
    with load() as engine:
        both = engine.generate(
            [PROMPT] * 2, settings=[{}, {"num_beams": 3, "num_return_sequences": 2}],
            max_new_tokens=COUNT,
        )  # fmt: skip
        figures = engine.statistics()
    assert [c.report["decoding"].name for c in both] == ["sample", "beam", "beam"]
    assert [c.report["decoding"].beams for c in both] == [None, 3, 3]
    assert both[1].report["decoding"].calls == COUNT
    assert ", 3 beams): 12 calls" in str(both[1].report)
    assert both[1].to_dict()["report"]["decoding"]["beams"] == 3
    assert both[1].to_dict()["score"] == both[1].score > both[2].score
    assert "score" not in both[0].to_dict()
    assert (figures.tokens_in, figures.tokens_out) == (2 * len(PROMPT), 3 * COUNT)
    assert figures.finished == {"length": 3}
    # The prompt is read once, and each step feeds a token of every beam.
    assert figures.tokens_computed == 2 * len(PROMPT) + (COUNT - 1) * (1 + 3)


@pytest.mark.parametrize("cache", ["paged?page_size=4", "dynamic"])
def test_a_search_that_is_cancelled_or_late_says_its_best_so_far(cache: str) -> None:
    expected = references("llama", num_beams=3, eos_token_id=ENDS)[0]
    for steps in (0, 1, 5):
        with load(cache_implementation=cache) as engine:
            asked = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": COUNT}
            loop = engine._loop
            made = engine._intake.sequences(PROMPT, {**asked, "deadline": 1000.0}, streams=False)
            other = engine._intake.sequence(PROMPT, {"max_new_tokens": COUNT}, streams=False)
            for sequence in (*made, other):
                loop.submit(sequence)
            for _ in range(steps):
                loop.step()
            if steps == 5:
                age(engine, made[1], 2000)
                events = loop.step()[:2]
                assert made[0].error == "its deadline of 1000 s passed"
            else:
                events = loop.cancel(made[1])
            assert [event.sequence for event in events] == made
            assert {s.finish_reason for s in made} == {"cancelled"}
            assert [len(s.new_tokens) for s in made] == [steps if steps else 0] * 2 or steps == 1
            assert all(event.tokens == event.sequence.new_tokens for event in events)
            assert loop.cancel(made[0]) == []
            while loop.running or loop.waiting:
                loop.step()
            assert other.new_tokens == oracle(plain("llama"), PROMPT, COUNT)
            if usage := loop.cache.usage():
                assert usage.pages_used == 0
            assert_same(texts(engine.generate(PROMPT, num_beams=3, eos_token_id=ENDS,
                                       max_new_tokens=COUNT)), expected)  # fmt: skip


def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > len(PROMPT) + 2:
        raise ValueError("enough")
    return scores


def nothing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -math.inf if ids.shape[1] > len(PROMPT) + 2 else 0.0)


def nonsense(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * math.nan


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (failing, "its logits_processor failed: ValueError: enough"),
        (nothing, "no token can be chosen: its settings forbid every token"),
        (
            nonsense,
            "its logits_processor failed: ValueError: the scores that it returns are not numbers",
        ),
    ],
)
@pytest.mark.parametrize("cache", ["paged?page_size=4", "dynamic"])
def test_a_search_that_fails_ends_alone(cache: str, processor: Any, why: str) -> None:
    own = {"num_beams": 3, "num_return_sequences": 2, "logits_processor": processor}
    with load(cache_implementation=cache) as engine:
        found = engine.generate(
            [PROMPT] * 3, settings=[{"num_beams": 4}, own, {}], max_new_tokens=COUNT
        )
        assert [c.finish_reason for c in found] == ["length", "error", "error", "length"]
        assert {c.error for c in found[1:3]} == {why}
        assert_same(texts(found[:1]), references("llama", num_beams=4)[0])
        assert found[3].token_ids == oracle(plain("llama"), PROMPT, COUNT)


class Panic(BaseException):
    """What the failure of a library in Rust is."""


class Panicking:
    """A tokenizer that panics at one token, from the `after`th time on that it sees it."""

    def __init__(self, token: int, after: int) -> None:
        self._inner, self._token, self._left = character_tokenizer(), token, after

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._inner(*arguments, **more)

    def decode(self, ids: list[int], **more: Any) -> str:
        if self._token in ids:
            self._left -= 1
            if self._left < 0:
                raise Panic("index out of bounds")
        return self._inner.decode(ids, **more)


@pytest.mark.parametrize("after", range(6))
def test_a_tokenizer_that_panics_in_a_search_ends_it_alone(after: int) -> None:
    """Whoever is the one that asks it: the search, its check, or what the beams grow by."""
    own = {"num_beams": 2, "stop": ["zzzz"]}
    expected = oracle(plain("llama"), PROMPT, COUNT)
    other = prompts(LENGTHS)[1]
    with load() as engine:
        (beams,) = engine.generate(other, num_beams=2, max_new_tokens=COUNT)
    token = next(t for t in beams.token_ids if t not in expected)
    with load(tokenizer=Panicking(token, after)) as engine:
        found = engine.generate([other, PROMPT], settings=[own, {}], max_new_tokens=COUNT)
        assert [c.finish_reason for c in found] == ["error", "length"]
        assert found[0].error == "its tokens do not decode: Panic: index out of bounds"
        assert found[1].token_ids == expected
        assert engine.health().failure is None


def test_fewer_texts_than_were_asked_for() -> None:
    """Two tokens that may come, one of which ends the text, make few texts of three tokens."""
    ends, goes = 7, 8
    bias = {(token,): -math.inf for token in range(VOCAB) if token not in (ends, goes)}
    with load() as engine:
        found = engine.generate(
            PROMPT, num_beams=6, num_return_sequences=6, max_new_tokens=3, sequence_bias=bias,
            eos_token_id=ends,
        )  # fmt: skip
    said = {tuple(c.token_ids) for c in found if c.finish_reason != "error"}
    assert said == {(ends,), (goes, ends), (goes, goes, ends), (goes, goes, goes)}
    errors = [c.error for c in found if c.finish_reason == "error"]
    assert errors == ["the search found 4 texts, and 6 were asked for"] * 2


def test_a_group_waits_for_all_of_its_places() -> None:
    """Beams that are to come have places, so no batch is larger than it may be."""
    most = []
    arrivals = [
        Arrival(n // 3, text, max_new_tokens=6, **({"num_beams": 3} if n % 2 else {}))
        for n, text in enumerate(prompts((5,) * 12))
    ]
    with load(max_batch_size=4) as engine:
        drive(engine, arrivals, after=lambda loop: most.append(len(loop.running)))
        (engine.generate(PROMPT, num_beams=4, max_new_tokens=3))
    assert max(most) == 4


class Stingy(Schedule):
    """Gives one sequence a token, in turn."""

    turn = 0

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.id,)

    def schedule(self, running: Any, pending: Any, budget: int, now: float) -> list[int]:
        self.turn += 1
        return [n if i == self.turn % len(pending) else 0 for i, n in enumerate(pending)]


def test_a_scheduler_that_never_serves_a_whole_group_is_named() -> None:
    with load(cache_implementation="paged") as engine:
        engine._loop.scheduler = CheckedSchedule(Stingy(), "stingy")
        assert engine.generate(PROMPT, max_new_tokens=3)[0].finish_reason == "length"
        assert_mistake(
            PluginError,
            "^stingy: schedule gives no request all of its sequences$",
            lambda: engine.generate(PROMPT, num_beams=3, max_new_tokens=3),
        )


def group(width: int, **settings: Any) -> RunningGroup:
    asked = Settings(max_new_tokens=10, **settings)
    return RunningGroup([RunningSequence(n, [1, 2], asked) for n in range(width)], 1)


def test_whoever_goes_on_stays_where_it_is() -> None:
    one = group(3)
    a, b, c = one.members
    copies, dropped = one.grow([Continuation(0, 5, -1.0), Continuation(0, 6, -2.0)])
    assert (copies, dropped, one.beams) == ([(a, b)], [], [a, b])
    assert ([x.new_tokens for x in one.beams], one.scores) == ([[5], [6]], [-1.0, -2.0])
    chosen = [Continuation(1, 7, -2.0), Continuation(1, 8, -3.0), Continuation(1, 9, -4.0)]
    copies, dropped = one.grow(chosen)
    assert dropped == [a]
    assert {into.id for _, into in copies} == {a.id, c.id}
    assert one.beams[0] is b
    assert [x.new_tokens for x in one.beams] == [[6, 7], [6, 8], [6, 9]]


def test_ends_below_the_first_ranks_are_no_hypotheses() -> None:
    """Of two beams' four continuations the third ends, which is too late to count."""
    one = group(2, eos_token_ids=(3,))
    scores = torch.full((1, 6), -9.0)
    scores[0, [4, 5, 3]] = torch.tensor([-1.0, -2.0, -3.0])
    (decision,) = BeamSearch(BeamOptions(num_beams=2)).decide([one], [scores])
    assert decision.hypotheses == []
    assert [b.token for b in decision.beams] == [4, 5]
    scores[0, [4, 5, 3]] = torch.tensor([-1.0, -3.0, -2.0])
    (decision,) = BeamSearch(BeamOptions(num_beams=2, length_penalty=2.0)).decide([one], [scores])
    assert decision.hypotheses == [Hypothesis((3,), -2.0)]


class Wrong(Search):
    def __init__(self, found: Any) -> None:
        self.found = found

    def width(self, settings: Settings) -> int:
        return self.found  # type: ignore[no-any-return]

    def decide(self, groups: Any, scores: Any) -> list[Decision]:
        return self.found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([], "got 0 decisions"),
        (None, "decide raised TypeError"),
        ([Decision([Continuation(1, 4, 0.0)])], "where there are 1 beams"),
        ([Decision([Continuation(0, 99, 0.0)])], "where tokens are below 10"),
        ([Decision([Continuation(0, 4, 0.0)] * 3)], "3 beams of a group of 2"),
        ([Decision(hypotheses=[Hypothesis((), 0.0)])], r"a hypothesis of \(\)"),
    ],
)
def test_a_search_is_held_to_its_contract(found: Any, text: str) -> None:
    search = checked(Wrong(found), "mine", 10)
    assert isinstance(search, Search)
    assert_mistake(
        PluginError, f"^mine: .*{text}", lambda: search.decide([group(2)], [torch.zeros(1, 10)])
    )
    assert_mistake(
        PluginError, "width must return", lambda: search.width(Settings(max_new_tokens=1))
    )


def test_the_search_of_the_docs_is_greedy_decoding() -> None:
    """What a stranger reads of the contract is enough to write one that runs."""
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
    names: dict[str, Any] = vars(contracts).copy()
    (code,) = re.findall(r"```python\n(class Greedy.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/hooks.md", "exec"), names)  # noqa: S102 - our own page
    with load() as engine:
        old = engine._loop.decoding.strategies
        mine = {**old, "beam": checked(names["Greedy"](), "docs", VOCAB)}
        engine._loop.decoding = Decoder(mine)
        for stop in (None, ENDS):
            asked = {"max_new_tokens": COUNT, "eos_token_id": stop}
            found = engine.generate(prompts(LENGTHS), decoding="beam", **asked)
            expected = engine.generate(prompts(LENGTHS), decoding="sample", **asked)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]

"""Requests that come and go in one batch: each says what it says alone, whatever runs beside it."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from driven import Arrival, drive, tokens
from families import WINDOW, build, character_tokenizer, oracle, prompts, references
from storming import held_closely

import jackfield
from jackfield.contracts import Strategy
from jackfield.demo.tasks import TASKS, heldout
from jackfield.engine.decoder import Decoder

COUNT = WINDOW + 4
_draw = random.Random(7)
#: First many that fit into a window and grow out of it together, then all lengths, one by one.
LENGTHS = (WINDOW - 2,) * 16 + tuple(_draw.randint(WINDOW - 2, 3 * WINDOW) for _ in range(48))
ARRIVALS = (0,) * 16 + tuple(_draw.randint(0, 40) for _ in range(48))
#: (page size, tokens): room for the longest by itself and for a few beside it, so that they get in
#: each other's way. A window gives back what it has passed, so it takes small pages to be short.
TIGHT = {"llama": (4, 72), "mistral": (1, 35), "gemma3": (4, 72), "gemma4": (4, 72)}

model_of = functools.cache(build)


@pytest.fixture(autouse=True)
def closely() -> Iterator[None]:
    """jackfield's own cache of pages is held to what a stranger's is held to."""
    with held_closely():
        yield


def paged(family: str, sharing: bool = True, swap: bool = False, num_tokens: int = 0) -> str:
    page, tight = TIGHT[family]
    size = num_tokens or tight
    return f"paged?page_size={page}&num_tokens={size}&prefix_sharing={sharing}&swap={swap}"


def staggered(texts: Seq[Seq[int]], **settings: Any) -> list[Arrival]:
    return [
        Arrival(at, text, max_new_tokens=COUNT, **settings)
        for at, text in zip(ARRIVALS, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("chunk", "sharing", "swap"),
    [(16, on, swap) for on in (False, True) for swap in (False, True)]
    + [(chunk, both, both) for chunk in (1, 512) for both in (False, True)],
)
@pytest.mark.parametrize("family", TIGHT)
@pytest.mark.one_in(4)
def test_staggered_requests_in_a_tight_pool_say_what_they_say_alone(
    family: str, chunk: int, sharing: bool, swap: bool
) -> None:
    swaps: list[int] = []
    with jackfield.load(
        model_of(family),
        cache_implementation=paged(family, sharing, swap),
        prefill_chunk_size=chunk,
    ) as engine:
        found = drive(
            engine,
            staggered(prompts(LENGTHS)),
            after=lambda loop: swaps.append(loop.cache.usage().swapped),
        )
        figures = engine.statistics()
    assert tokens(found) == references(family, LENGTHS, COUNT)
    assert figures.preemptions > 0
    assert bool(max(swaps)) is swap
    assert figures.cache.pages_used == 0
    assert figures.cache.swapped == 0
    if swap:  # what was preempted is not computed again
        most = sum(LENGTHS) + len(LENGTHS) * (COUNT - 1)
        assert figures.tokens_computed <= most
    assert figures.finished == {"length": len(LENGTHS)}


@pytest.mark.parametrize("chunk", [1, 16, 512])
@pytest.mark.parametrize("family", TIGHT)
@pytest.mark.one_in(4)
def test_a_second_round_finds_its_prompts_and_says_the_same(family: str, chunk: int) -> None:
    with jackfield.load(
        model_of(family),
        cache_implementation=paged(family, num_tokens=64 * 40),
        prefill_chunk_size=chunk,
    ) as engine:
        engine._loop.cache.inner._forgets = False  # as for a model that nobody else holds
        first = tokens(drive(engine, staggered(prompts(LENGTHS))))
        before = engine.statistics().cache.prefix_tokens
        again = drive(engine, staggered(prompts(LENGTHS)))
        found = engine.statistics().cache.prefix_tokens - before
        salted = drive(engine, staggered(prompts(LENGTHS), cache_salt="another"))
        apart = engine.statistics().cache.prefix_tokens - before - found
        preemptions = engine.statistics().preemptions
    # Pages of one token are found by other prompts too, in the first round and under a new salt.
    assert first == tokens(again) == tokens(salted) == references(family, LENGTHS, COUNT)
    page = TIGHT[family][0]
    whole = sum((length - 1) // page * page for length in LENGTHS)
    assert (found, apart, preemptions) == (whole, before, 0)


def test_without_sharing_nothing_is_found() -> None:
    with jackfield.load(
        model_of("llama"), cache_implementation=paged("llama", sharing=False, num_tokens=64 * 40)
    ) as engine:
        for _ in range(2):
            assert tokens(drive(engine, staggered(prompts(LENGTHS)))) == references(
                "llama", LENGTHS, COUNT
            )
        assert engine.statistics().prefix_hit_rate == 0


@pytest.mark.parametrize("family", TIGHT)
@pytest.mark.one_in(4)
def test_prompts_with_one_beginning_share_it_while_it_is_held_and_preempted(family: str) -> None:
    """Shared pages under preemption: nobody's beginning is given away while another reads it."""
    beginning = prompts((2 * WINDOW,))[0]
    texts = [[*beginning, *end] for end in prompts(tuple(1 + n % 7 for n in range(24)))]
    model = model_of(family)
    with jackfield.load(model, cache_implementation=paged(family)) as engine:
        found = drive(
            engine,
            [Arrival(n // 3, text, max_new_tokens=COUNT) for n, text in enumerate(texts)],
        )
        figures = engine.statistics()
    assert tokens(found) == [oracle(model, text, COUNT) for text in texts]
    assert figures.preemptions > 0 or family == "mistral"  # a window that is full grows no more
    assert figures.cache.prefix_tokens > 0
    assert figures.cache.pages_used == 0


@pytest.mark.parametrize("family", TIGHT)
@pytest.mark.one_in(4)
def test_threads_that_submit_at_will_get_what_they_get_alone(family: str) -> None:
    texts, found = prompts(LENGTHS), {}
    with jackfield.load(
        model_of(family), cache_implementation=paged(family, swap=True), prefill_chunk_size=16
    ) as engine:

        def client(first: int) -> None:
            for number in range(first, len(texts), 8):
                request = engine.submit(texts[number], max_new_tokens=COUNT)
                found[number] = request.result(120).token_ids

        threads = [threading.Thread(target=client, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert engine.statistics().cache.pages_used == 0
    assert [found[n] for n in range(len(texts))] == references(family, LENGTHS, COUNT)


def cold(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of one request: even token ids lose as the text grows."""
    scores[:, ::2] -= 0.1 * ids.shape[1]
    return scores


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.1, "seed": 3},
    {"temperature": 2.0, "seed": 4, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "seed": 5, "min_p": 0.05},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.7, "seed": 6},
    {"sequence_bias": {(5,): 4.0, (5, 6): 8.0}},
    {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [10, 11], "temperature": 1.3, "seed": 7},
    {"temperature": 1.5, "seed": 8, "num_return_sequences": 3},
    {"stop": ["a", "e", "xy"], "temperature": 2.0, "seed": 9},
    {"eos_token_id": list(range(0, 120, 9)), "min_new_tokens": 3},
    {"logits_processor": cold},
    {"logits_processor": [cold, cold], "temperature": 0.9, "seed": 10, "logprobs": 2},
    {"temperature": 2.5},
]


@pytest.mark.parametrize("cache", ["dynamic", paged("gemma3", num_tokens=96, swap=True)])
def test_one_batch_of_many_settings_equals_each_alone(cache: str) -> None:
    texts = prompts(tuple(5 + 2 * n for n in range(len(MIXED))))
    with jackfield.load(
        model_of("gemma3"), tokenizer=character_tokenizer(), cache_implementation=cache
    ) as engine:

        def run(texts: Any, **settings: Any) -> list[tuple[Any, ...]]:
            found = engine.generate(texts, max_new_tokens=COUNT, **settings)
            logprobs = [[(p.token_id, round(p.logprob, 9)) for p in c.logprobs] for c in found]
            return [
                (c.token_ids, c.text, c.finish_reason, p)
                for c, p in zip(found, logprobs, strict=True)
            ]

        alone = [c for t, s in zip(texts, MIXED, strict=True) for c in run(t, **s)]
        together = run(texts, settings=MIXED)
    assert len(together) == len(MIXED) + 2
    assert together[:-1] == alone[:-1]
    assert together[-1] != alone[-1]  # the one without a seed


def test_three_samples_of_a_prompt_differ_share_its_pages_and_come_again() -> None:
    pages, page = 4, TIGHT["llama"][0]
    (text,) = prompts((pages * page + 1,))
    model = model_of("llama")

    def run(**settings: Any) -> tuple[list[list[int]], jackfield.Statistics]:
        with jackfield.load(model, cache_implementation=paged("llama", num_tokens=256)) as engine:
            found = engine.generate(
                text, num_return_sequences=3, temperature=1.5, max_new_tokens=COUNT, **settings
            )
            return [c.token_ids for c in found], engine.statistics()

    found, figures = run(seed=11)
    assert len({tuple(t) for t in found}) == 3
    assert figures.cache.prefix_tokens == 2 * pages * page
    assert figures.tokens_computed == len(text) + 2 + 3 * (COUNT - 1)
    assert run(seed=11)[0] == found
    assert run(seed=12)[0] != found
    assert run()[0] != run()[0]


def demo_chats(count: int) -> list[str]:
    each = -(-count // len(TASKS))
    return [item.prompt for task in TASKS for item in heldout(task, each, seed=9)][:count]


def divergences(model: Any, texts: list[list[int]], found: Any, alone: Any) -> list[str]:
    """Where two greedy texts part, and by how much the model preferred what it preferred there."""
    lines = []
    for number, (one, other) in enumerate(zip(found, alone, strict=True)):
        if one == other:
            continue
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        ids = torch.tensor([texts[number] + other[:at]])
        with torch.inference_mode():
            top = model(ids).logits[0, -1].double().topk(2)
        margin = float(top.values[0] - top.values[1])
        lines.append(f"prompt {number} parts at new token {at}, where the margin is {margin:.2e}")
        assert {one[at], other[at]} == set(top.indices.tolist()), lines
        assert margin < 1e-4, lines
    return lines


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.long)])
def test_demo_prompts_in_float32_equal_their_solo_runs(count: int) -> None:
    """Only a tie within rounding may fall the other way; it is reported, with its margin."""
    with jackfield.load(
        "demo",
        dtype="float32",
        cache_implementation="paged?page_size=4&num_tokens=480",
        prefill_chunk_size=16,
    ) as engine:
        chats = [[{"role": "user", "content": text}] for text in demo_chats(count)]
        texts = [engine._assembly.text.encode(chat) for chat in chats]
        alone = [engine.generate(text, max_new_tokens=16)[0].token_ids for text in texts]
        arrivals = [
            Arrival(n // 4, text, max_new_tokens=16, cache_salt="together")
            for n, text in enumerate(texts)
        ]
        found = tokens(drive(engine, arrivals))
        assert engine.statistics().preemptions > 0
        parted = divergences(engine.model, texts, found, alone)
    print(f"{len(parted)} of {len(texts)} part", *parted, sep="\n")  # noqa: T201 - the report


def test_drafts_of_one_sequence_preempt_nobody() -> None:
    """Guesses are given up before anybody goes, and never reach beyond the last token."""
    model = build("llama")
    (prompt,) = prompts((3,))
    with jackfield.load(model, cache_implementation="paged?page_size=4&num_tokens=32") as engine:
        expected = engine.generate(prompt, max_new_tokens=30)[0].token_ids
        wrong = lambda sequences, most: [[5] * min(6, room) for room in most]  # noqa: E731
        engine._loop.decoding = Decoder({"sample": Guesses(wrong)}, frozenset({"sample"}))
        assert engine.generate(prompt, max_new_tokens=30)[0].token_ids == expected


class Guesses(Strategy):
    """Drafts as a function makes them."""

    def __init__(self, make: Callable[[Any, Any], list[list[int]]]) -> None:
        self.propose = make  # type: ignore[method-assign]

    def propose(self, sequences: Any, max_drafts: Any) -> list[list[int]]:
        raise AssertionError

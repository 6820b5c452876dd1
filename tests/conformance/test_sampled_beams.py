"""Beams that are drawn: transformers' own code with our random numbers says the same, to the text.

What those numbers are worth is shown apart: that they draw as they have to, and that texts come as
often as with the numbers that transformers draws itself.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from beams import (
    BOTH,
    COUNT,
    CPU,
    ENDS,
    LENGTHS,
    assert_same,
    drawn,
    model_of,
    plain,
    references,
    texts,
)
from drafting import repetitive
from driven import Arrival, drive
from families import VOCAB, WINDOW, build, character_tokenizer, prompts

import jackfield
from jackfield.contracts import Settings
from jackfield.contracts.counter_rng import gumbel
from jackfield.engine.sequences import RunningGroup, RunningSequence
from jackfield_plugins.decoding.beam import BeamOptions, BeamSearch

SHAPED: list[dict[str, Any]] = [
    {"do_sample": True, "num_beams": 3},
    {"temperature": 1.7, "num_beams": 4, "num_return_sequences": 4},
    {"temperature": 0.4, "num_beams": 2, "eos_token_id": list(ENDS)},
    {"top_k": 30, "num_beams": 3, "num_return_sequences": 2, "length_penalty": -1.0},
    {"top_k": 1, "num_beams": 2, "temperature": 1.3},  # of which transformers makes two
    {"top_k": 1, "num_beams": 2, "eos_token_id": list(ENDS[:6])},  # and here seven
    {"top_p": 0.8, "num_beams": 3, "eos_token_id": list(ENDS), "early_stopping": True},
    {"top_p": 0.1, "num_beams": 2, "early_stopping": "never", "length_penalty": 2.0},
    {"min_p": 0.05, "num_beams": 4, "repetition_penalty": 1.4},
    {"top_k": 9, "num_beams": 3, "repetition_penalty": 1.8, "renormalize_logits": True},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.02, "num_beams": 5,
     "num_return_sequences": 3, "sequence_bias": [[[5], 3.0]], "eos_token_id": list(ENDS)},
]  # fmt: skip


@pytest.mark.parametrize("asked", SHAPED, ids=repr)
@pytest.mark.one_in(4)
def test_the_same_numbers_draw_the_same_texts_as_in_transformers(asked: dict[str, Any]) -> None:
    expected = [
        drawn("llama", prompt, seed, **{**asked, "do_sample": True})
        for seed, prompt in enumerate(prompts(LENGTHS))
    ]
    for cache in ("paged?page_size=4", "dynamic"):
        with jackfield.load(model_of("llama"), decoding=BOTH, cache_implementation=cache) as engine:
            found = engine.generate(
                prompts(LENGTHS),
                settings=[{**asked, "seed": seed} for seed in range(len(LENGTHS))],
                max_new_tokens=COUNT,
            )
            assert_same(texts(found), [one for own in expected for one in own])


def test_a_seed_says_the_same_whatever_runs_beside_it() -> None:
    """In batches, beside other requests, in prompts in chunks, and by another cache."""
    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "temperature": 1.2}
    kinds = [{**asked, "seed": n} for n in range(3)]
    others: list[dict[str, Any]] = [{}, {"num_beams": 4}, {"temperature": 1.0, "seed": 1}]
    first, *_ = prompts(LENGTHS)
    found = []
    for cache, chunk in (("paged?page_size=4", None), ("dynamic", 2)):
        with jackfield.load(
            model_of("llama"), decoding=BOTH, cache_implementation=cache, prefill_chunk_size=chunk
        ) as engine:
            alone = [engine.generate(first, max_new_tokens=COUNT, **own) for own in kinds]
            together = engine.generate(
                [first] * 6, settings=[*others, *kinds], max_new_tokens=COUNT
            )
            found += [texts([one for own in alone for one in own]), texts(together[-6:])]
            beside = engine.generate(first, num_beams=4, max_new_tokens=COUNT)
            assert texts(together[1:2]) == texts(beside)  # which does not draw
    for one in found[1:]:
        assert_same(one, found[0])
    assert len({tuple(text) for text, _ in found[0]}) == 6


def test_what_a_model_samples_with_leaves_beams_alone_that_are_not_drawn() -> None:
    model = build("llama")
    model.generation_config.top_k, model.generation_config.temperature = 1, 3.0
    with jackfield.load(model, decoding="beam") as engine:
        kinds = [
            {"num_beams": 4, "do_sample": False, "num_return_sequences": 3},
            {"num_beams": 3, "do_sample": True},
        ]
        found = engine.generate(
            [prompts(LENGTHS)[0]] * 2, settings=kinds, seed=1, max_new_tokens=COUNT
        )
    assert_same(texts(found[:3]), references("llama", num_beams=4, num_return_sequences=3)[0])
    drawn_with = {"num_beams": 3, "do_sample": True, "top_k": 1, "temperature": 3.0}
    assert_same(texts(found[3:]), drawn("llama", prompts(LENGTHS)[0], 1, **drawn_with))


def test_drawn_groups_that_are_preempted_go_on_as_if_nothing_had_happened() -> None:
    asked: dict[str, Any] = {"num_beams": 3, "temperature": 1.5, "eos_token_id": list(ENDS)}
    everyone = repetitive(9, WINDOW)
    arrivals = [
        Arrival(n // 2, text, max_new_tokens=COUNT, seed=n, **asked)
        for n, text in enumerate(everyone)
    ]
    with jackfield.load(
        model_of("llama"), decoding=BOTH, cache_implementation="paged?page_size=4&num_tokens=96"
    ) as engine:
        found = drive(engine, arrivals)
        assert engine.statistics().preemptions > 0
    for n, text in enumerate(everyone):
        assert_same(texts(found[n]), drawn("llama", text, n, do_sample=True, **asked))


def test_a_structure_holds_in_what_is_drawn() -> None:
    pytest.importorskip("llguidance", reason="needs jackfield[structured]")
    words = ["yes", "no", "perhaps", "nobody knows"]
    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "temperature": 4.0}
    said = collections.Counter()
    with jackfield.load("demo", dtype="float32", decoding=BOTH) as engine:
        for seed in range(10):
            both = engine.generate("Is it?", seed=seed, choices=words, **asked)
            assert both[0].text != both[1].text
            said.update(one.text for one in both)
    assert said.keys() <= set(words)
    assert len(said) > 2


def test_stop_strings_end_what_is_drawn_as_in_transformers() -> None:
    tokenizer = character_tokenizer()
    asked: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "temperature": 1.3}
    prompt = prompts(LENGTHS)[0]
    with jackfield.load(model_of("llama"), decoding="beam", tokenizer=tokenizer) as engine:
        free = engine.generate(prompt, seed=3, max_new_tokens=COUNT, **asked)
        stop = [one.text[4:6] for one in free]
        found = engine.generate(prompt, seed=3, max_new_tokens=COUNT, stop=stop, **asked)
    expected = drawn(
        "llama", prompt, 3, do_sample=True, stop_strings=stop, tokenizer=tokenizer, **asked
    )
    assert_same(texts(found), [(text[: len(c.token_ids)], score) for (text, score), c in
                        zip(expected, found, strict=True)])  # fmt: skip
    assert "stop" in {one.finish_reason for one in found}


def chi_square(seen: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """How many standard deviations the statistic lies above its mean, which is the freedom."""
    assert seen.keys() <= expected.keys()
    value = sum((seen.get(k, 0) - e) ** 2 / e for k, e in expected.items())
    freedom = len(expected) - 1
    return (value - freedom) / math.sqrt(2 * freedom)


def test_draws_without_replacement_come_as_often_as_they_have_to() -> None:
    """Each ordered draw of four from six: one by one, of what is left (Plackett 1975)."""
    scores = torch.tensor([[-1.0, -2.5, -0.7], [-1.9, -math.inf, -3.0]])
    chances = scores.flatten().double().exp().tolist()
    expected = {}
    for order in itertools.permutations([0, 1, 2, 3, 5], 4):
        left, chance = sum(chances), 1.0
        for place in order:
            chance *= chances[place] / left
            left -= chances[place]
        expected[order] = chance
    assert sum(expected.values()) == pytest.approx(1)
    seen: collections.Counter[Any] = collections.Counter()
    count = 12000
    for seed in range(count):
        noise = gumbel(seed, 7, 6, CPU)
        seen[tuple((scores.flatten() + noise).topk(4).indices.tolist())] += 1
    rare = {k: count * e for k, e in expected.items() if count * e >= 5}
    assert len(rare) > 60
    assert chi_square({k: n for k, n in seen.items() if k in rare}, rare) < 4


def test_texts_come_as_often_as_transformers_draws_them_itself() -> None:
    """The best of two beams of two tokens out of five; the same number of texts from both."""
    count, few = 1200, [5, 17, 40, 66, 101]
    prompt = prompts((5,))[0]
    asked: dict[str, Any] = {
        "num_beams": 2, "max_new_tokens": 2, "temperature": 2.5, "do_sample": True,
        "suppress_tokens": [token for token in range(VOCAB) if token not in few],
    }  # fmt: skip
    torch.manual_seed(0)
    rows = torch.tensor([prompt] * count)
    theirs = plain("llama").generate(
        rows, attention_mask=torch.ones_like(rows), pad_token_id=0, top_k=0, **asked
    )
    with jackfield.load(model_of("llama"), decoding="beam", max_batch_size=256) as engine:
        own = engine.generate(
            [prompt] * count, settings=[{"seed": seed} for seed in range(count)], **asked
        )
    ours = collections.Counter(tuple(one.token_ids) for one in own)
    others = collections.Counter(tuple(row) for row in theirs[:, len(prompt) :].tolist())
    often = [text for text in ours | others if ours[text] + others[text] >= 10]
    assert len(often) > 5
    value = sum((ours[t] - others[t]) ** 2 / (ours[t] + others[t]) for t in often)
    freedom = len(often)
    assert value < freedom + 4 * math.sqrt(2 * freedom)


def test_what_is_no_number_is_never_drawn() -> None:
    asked = Settings(max_new_tokens=10, do_sample=True)
    group = RunningGroup([RunningSequence(n, [1, 2], asked) for n in range(3)], 1)
    search = BeamSearch(BeamOptions(num_beams=3))
    scores = torch.full((1, 9), -math.inf)
    (none,) = search.decide([group], [scores])
    assert (none.beams, none.hypotheses, none.error) == ([], [], None)
    scores[0, 4] = -700.0
    (one,) = search.decide([group], [scores])
    assert [(b.token, b.score) for b in one.beams] == [(4, -700.0)]
    scores[0, 5] = math.nan
    (wrong,) = search.decide([group], [scores])
    assert wrong.error == "no token can be chosen: the logits are not numbers"


@pytest.mark.parametrize("temperature", [1e-38, 3e38])
def test_a_temperature_at_the_end_of_float32_draws_texts(temperature: float) -> None:
    with jackfield.load(model_of("llama"), decoding="beam") as engine:
        (found,) = engine.generate([[5, 6, 7]], temperature=temperature, num_beams=2,
                                   max_new_tokens=COUNT)  # fmt: skip
    assert (found.finish_reason, len(found.token_ids)) == ("length", COUNT)
    assert found.score is not None
    assert math.isfinite(found.score)


def test_gumbel_numbers_are_keyed() -> None:
    """A row begins like a shorter one; seed and position change all of it."""
    whole = gumbel(3, 9, 1000, CPU)
    assert whole.dtype == torch.float64
    assert torch.equal(whole[:10], gumbel(3, 9, 10, CPU))
    for other in (gumbel(4, 9, 1000, CPU), gumbel(3, 10, 1000, CPU), gumbel(-3, 9, 1000, CPU)):
        assert not torch.isclose(whole, other).any()
    many = gumbel(2**63, 1, 200_000, CPU)
    assert many.isfinite().all()
    assert float(many.mean()) == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert float(many.var()) == pytest.approx(math.pi**2 / 6, rel=0.03)

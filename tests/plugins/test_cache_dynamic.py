"""``dynamic`` takes rejected drafts back, row by row, where a layer sees every column."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from families import build, config_of, prompts, references

import jackfield
from jackfield.contracts import Accepted, Sequence, Strategy
from jackfield.engine.decoder import Decoder, StepChoice
from jackfield.engine.steps import RunningStep
from jackfield.planning.solving import reasons_against
from jackfield.registry.discovery import registry
from jackfield.spelling import parse

LENGTHS = (3, 5, 12, 4)
COUNT = 14
PROMPTS = prompts(LENGTHS)


class Guesses(Strategy):
    """Drafts of the right tokens, spoilt at a place that differs by row and step; greedy."""

    def __init__(self, expected: list[list[int]], longest: int) -> None:
        self.expected = {tuple(p): tokens for p, tokens in zip(PROMPTS, expected, strict=True)}
        self.longest = longest

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        return [self.draft(s)[:room] for s, room in zip(sequences, max_drafts, strict=True)]

    def draft(self, sequence: Sequence) -> list[int]:
        coming = self.expected[tuple(sequence.tokens[: sequence.prompt_length])]
        size = (sequence.id + sequence.num_new) % (self.longest + 1)
        drafts = coming[sequence.num_new : sequence.num_new + size]
        good = (sequence.id + 2 * sequence.num_new) % (self.longest + 1)
        return drafts[:good] + [(token + 1) % 120 for token in drafts[good:]]


class Watched(Decoder):
    """A decoder that notes how many tokens each sequence gained in each step."""

    def __init__(self, guesses: Guesses) -> None:
        super().__init__({"sample": guesses}, frozenset({"sample"}))
        self.kept: list[list[int]] = []

    def accept(self, step: RunningStep, choice: StepChoice) -> list[Accepted]:
        gains = super().accept(step, choice)
        self.kept.append([len(gain.tokens) for gain in gains])
        return gains


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("cache", ["dynamic", "paged"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "llama-mqa", "qwen3", "gpt2", "opt"])
def test_ragged_acceptance_equals_plain_decoding(
    family: str, attention: str, cache: str, chunk: int | None, steps: Any
) -> None:
    expected = references(family, LENGTHS, COUNT)
    watched = Watched(Guesses(expected, longest=4))
    with jackfield.load(
        build(family),
        attn_implementation=attention,
        cache_implementation=cache,
        prefill_chunk_size=chunk,
    ) as engine:
        engine._loop.decoding = watched
        *_, found = steps(engine, PROMPTS, [COUNT] * len(PROMPTS))
    assert found == expected
    # Rows kept different numbers of drafts in one step, and whole columns were dropped too.
    assert any(len(set(kept)) > 2 for kept in watched.kept)
    if cache == "dynamic":
        assert len(watched.kept) < COUNT + 12 // (chunk or 12)


@pytest.mark.parametrize("cache", ["paged"])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2"])
def test_sliding_windows_take_drafts_back_in_pages(family: str, cache: str, steps: Any) -> None:
    expected = references(family, LENGTHS, COUNT)
    with jackfield.load(build(family), cache_implementation=cache) as engine:
        engine._loop.decoding = Watched(Guesses(expected, longest=4))
        *_, found = steps(engine, PROMPTS, [COUNT] * len(PROMPTS))
    assert found == expected


@pytest.mark.parametrize(
    ("family", "cache", "says"),
    [
        ("llama", "dynamic", None),
        ("gemma3", "paged", None),
        ("gemma3", "dynamic", "cannot take back tokens of sliding_attention layers"),
        ("mistral", "dynamic", "cannot take back tokens of sliding_attention layers"),
        ("falcon-alibi", "dynamic", "under a position bias (alibi = True)"),
        ("llama", "static", "cannot take back tokens (rollback)"),
    ],
)
def test_rollback_is_declared_where_it_holds(family: str, cache: str, says: str | None) -> None:
    found = registry().find("cache", parse(cache))
    needs = replace(jackfield.plan(config_of(family)).requirements, rollback=True, dtype="float32")
    reasons = reasons_against(found, needs, found.backend.options())
    assert len(reasons) == (says is not None)
    assert all(str(says) in reason for reason in reasons)

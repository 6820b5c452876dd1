"""A stranger's static cache that takes drafts back, while rows end at different times."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from families import build, prompts, references

import jackfield
from jackfield.contracts import BindContext, CacheCapabilities, TransformersCache
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry

LENGTHS = (5, 9, 3, 6)
COUNTS = ([2, 40, 33, 36], [40, 2, 31, 1], [1, 1, 24, 38])
PROMPTS = prompts(LENGTHS)


class Forgetful(transformers.StaticCache):
    """What is taken back is written over."""

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.cumulative_length.add_(tokens_to_remove)  # type: ignore[union-attr]


class Rolling(TransformersCache):
    name = "rolling"
    capabilities = CacheCapabilities(
        layout="padded",
        layer_types=frozenset({"full_attention"}),
        rollback=frozenset({"full_attention"}),
        static_shapes=True,
    )

    def make(self, context: BindContext, length: int | None) -> transformers.Cache:
        assert length is not None
        return Forgetful(config=context.config, max_cache_len=length)


class Tight(Rolling):
    """Without a column to spare: rows go without drafts where these might leave holes."""

    def max_cache_len(self, options: Any) -> int:
        return max(LENGTHS) + 40 - 1


class Guesses:
    """Drafts that are right for a while, and wrong from another place on for each sequence."""

    def __init__(self, engine: jackfield.Engine, expected: list[list[int]]) -> None:
        self.expected = {tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)}
        self.idle_and_ragged = 0
        self.cache: Any = engine._loop.cache
        inner = engine._loop.decoding.propose

        def propose(sequences: Any) -> list[list[int]]:
            inner(sequences)
            return [self.of(s) for s in sequences]

        engine._loop.decoding.propose = propose  # type: ignore[method-assign]
        commit = self.cache.commit

        def committed(step: Any, kept: Any) -> None:
            ragged = {
                item.num_tokens + len(item.drafts) - n
                for item, n in zip(step.scheduled, kept, strict=True)
            }
            self.idle_and_ragged += len(ragged) > 1 and None in self.cache._rows
            commit(step, kept)

        self.cache.commit = committed

    def of(self, sequence: Any) -> list[int]:
        room = sequence.settings.max_new_tokens - sequence.num_new - 1
        if len(sequence.tokens) - sequence.num_cached != 1 or room < 1:
            return []
        whole = self.expected[tuple(sequence.tokens[: sequence.prompt_length])]
        at = sequence.num_new
        drafts = whole[at : at + min(room, 3)]
        wrong = (sequence.id + at) % 4
        return [(t + 1) % 100 + 2 if n >= wrong else t for n, t in enumerate(drafts)]


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafts_are_taken_back_by_row_while_others_idle(
    monkeypatch: pytest.MonkeyPatch, family: str, counts: list[int], tight: bool
) -> None:
    mine = Registered(Tight() if tight else Rolling(), "stranger", "1.0", "ep")
    monkeypatch.setitem(registry().backends, "cache", [*registry().backends["cache"], mine])
    whole = references(family, LENGTHS, 40)
    expected = [tokens[:count] for tokens, count in zip(whole, counts, strict=True)]
    with jackfield.load(
        build(family), cache_implementation="rolling", decoding="prompt_lookup"
    ) as engine:
        guesses = Guesses(engine, whole)
        found = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in counts])
        speculation = engine.report().speculation
    assert [c.token_ids for c in found] == expected
    assert speculation is not None
    assert speculation.accepted > 0
    if not tight:
        assert guesses.idle_and_ragged > 0
        assert speculation.accepted < speculation.proposed

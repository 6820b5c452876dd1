"""The sampler on drafts: at every position what it says without them, one token at a time."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from random_settings import random_fields

from jackfield.contracts import Accepted, Settings
from jackfield.engine.sequences import RunningSequence
from jackfield.sampling.drafted import FIRST_COOLDOWN, JUDGED, LONGEST_COOLDOWN, Drafted
from jackfield.sampling.sampler import Sampler

VOCAB = 20


class Table:
    """A model: the logits after a text are drawn from the text alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        key = hash((self.seed, *tokens)) % (1 << 62)
        return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))


def counting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, ids.shape[1] % VOCAB] += 3
    return scores


def fields_of(rng: random.Random) -> dict[str, Any]:
    own = {
        "sequence_bias": {(t,): rng.uniform(-3, 3) for t in range(3)}
        | {(a, 4): 5.0 for a in range(VOCAB)} | {(4, a, 7): 9.0 for a in range(VOCAB)},
        "min_new_tokens": rng.randint(1, 9),
        "logits_processor": (counting, counting),
    }  # fmt: skip
    return random_fields(rng, 7, (3, 5), own)


def sequences(fields: list[dict[str, Any]]) -> list[RunningSequence]:
    return [
        RunningSequence(i, [4, 5, i], Settings(max_new_tokens=99, **f))
        for i, f in enumerate(fields)
    ]


def step_by_step(model: Table, sequence: RunningSequence, count: int) -> list[Accepted]:
    sampler, found = Sampler(), []
    for _ in range(count):
        (gain,) = sampler.choose([sequence], model(sequence.tokens)[None]).gains()
        found.append(gain)
        list.extend(sequence.tokens, gain.tokens)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_right_drafts_give_in_one_call_what_many_calls_give(seed: int) -> None:
    """Drafts of any length, right up to any place, for several steps, mixed in a batch."""
    rng, model = random.Random(seed), Table(seed)
    fields = [fields_of(rng) for _ in range(7)]
    expected = [step_by_step(model, s, 30) for s in sequences(fields)]
    together, sampler = sequences(fields), Sampler()
    kept = set()
    for _ in range(5):
        drafts = []
        for s, gains in zip(together, expected, strict=True):
            coming = [g.tokens[0] for g in gains[s.num_new : s.num_new + rng.randint(0, 5)]]
            wrong = rng.randint(0, 5)
            drafts.append([(t + (i == wrong)) % VOCAB for i, t in enumerate(coming)])
        logits = [
            model([*s.tokens, *own[:j]])
            for s, own in zip(together, drafts, strict=True)
            for j in range(len(own) + 1)
        ]
        found = sampler.choose(together, torch.stack(logits), drafts).gains()
        for s, own, gain, gains in zip(together, drafts, found, expected, strict=True):
            right = next((i for i, t in enumerate(own) if t != gains[s.num_new + i].tokens[0]),
                         len(own))  # fmt: skip
            assert gain.error is None
            at = slice(s.num_new, s.num_new + right + 1)
            assert list(gain.tokens) == [g.tokens[0] for g in gains[at]]
            assert [p.token_id for p in gain.logprobs] == [
                p.token_id for g in gains[at] for p in g.logprobs
            ]
            assert [p.logprob for p in gain.logprobs] == pytest.approx(
                [p.logprob for g in gains[at] for p in g.logprobs]
            )
            kept.add(len(gain.tokens))
            list.extend(s.tokens, gain.tokens)
    assert len(kept) > 3


def test_a_processor_is_asked_only_about_what_plain_decoding_asks_it() -> None:
    asked: list[list[int]] = []

    def spy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(ids[0].tolist())
        return scores

    sequence = RunningSequence(0, [1], Settings(max_new_tokens=9, logits_processor=(spy,)))
    logits = torch.eye(VOCAB)[[7, 8, 9, 10]]
    (gain,) = Sampler().choose([sequence], logits, [[7, 2, 9]]).gains()
    assert list(gain.tokens) == [7, 8]
    assert asked == [[1], [1, 7]]


def test_a_failure_behind_a_right_draft_ends_nothing_yet() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 3:
            raise ValueError("too long")
        return scores

    broken = torch.eye(VOCAB)[[7, 8, 9]]
    broken[1] = float("nan")
    one = RunningSequence(0, [1], Settings(max_new_tokens=9, logits_processor=(fails,)))
    two = RunningSequence(1, [1], Settings(max_new_tokens=9))
    logits = torch.cat([torch.eye(VOCAB)[[7, 8, 9]], broken])
    first, second = Sampler().choose([one, two], logits, [[7, 8], [7, 8]]).gains()
    assert (first.tokens, first.error) == ((7, 8), None)
    assert (second.tokens, second.error) == ((7,), None)
    one.tokens = [*one.tokens, 7, 8]
    two.tokens = [*two.tokens, 7]
    first, second = Sampler().choose([one, two], broken[:2]).gains()
    assert (first.tokens, first.error) == ((), "its logits_processor failed: ValueError: too long")
    assert "not numbers" in (second.error or "")


def test_a_strategy_that_does_not_pay_is_left_alone_for_longer_and_longer() -> None:
    drafted, cooldowns, waits = Drafted(), [], 0
    for _ in range(3000):
        if drafted.in_cooldown():
            waits += 1
            continue
        drafted.count(1, 4, 0)
        if drafted.cool_down(0.25):
            cooldowns.append(waits)
            assert drafted.cooldown
    lengths = [b - a for a, b in itertools.pairwise(cooldowns)]
    assert lengths[0] == FIRST_COOLDOWN
    assert lengths[-1] == LONGEST_COOLDOWN
    assert lengths == sorted(lengths)
    assert drafted.cooldowns == len(cooldowns)
    assert drafted.proposed == 4 * (3000 - waits)


def test_one_that_pays_goes_on_and_a_good_time_forgives_a_bad_one() -> None:
    drafted = Drafted()
    for _ in range(JUDGED):
        drafted.count(1, 4, 0)
    assert drafted.cool_down(0.25) == (0, 4 * JUDGED)
    for _ in range(10 * JUDGED):
        drafted.count(2, 4, 1)
        assert drafted.cool_down(0.25) is None
    for _ in range(JUDGED):
        drafted.count(1, 4, 0)
    assert drafted.cool_down(0.25) is not None
    assert drafted.cooldown == FIRST_COOLDOWN

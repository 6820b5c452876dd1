"""The sampler draws the tokens of a reference that sorts whole rows and reads whole contexts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import sampled_reference as reference
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from jackfield.contracts import Settings, StepBlock, Tokens
from jackfield.contracts.counter_rng import uniform, uniforms
from jackfield.engine.sequences import RunningSequence
from jackfield.sampling import histories, penalties
from jackfield.sampling.choosing import MANY, WIDE
from jackfield.sampling.one_row import OneRow
from jackfield.sampling.rows import RowMap
from jackfield.sampling.sampler import Sampler
from jackfield.sampling.token_table import TokenTable

VOCABULARIES = (37, WIDE - 1, WIDE, 5003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def row_of(rng: random.Random, size: int) -> torch.Tensor:
    """Logits of one row: flat, peaked, full of equals, mostly forbidden, far apart."""
    chance = torch.Generator().manual_seed(rng.getrandbits(32))
    noise = torch.randn(size, generator=chance, dtype=torch.float64)
    kind = rng.choice(("flat", "peaked", "equals", "constant", "forbidden", "far", "steps"))
    if kind == "peaked":
        noise = 12 - 1.8 * (1 + torch.randperm(size, generator=chance)).double().log() + noise
    elif kind == "equals":
        noise = (noise * rng.choice((1, 3))).round()
    elif kind == "constant":
        noise = torch.full_like(noise, rng.choice((0.0, -5.0, 7.25)))
    elif kind == "forbidden":
        noise[torch.rand(size, generator=chance) < rng.choice((0.5, 0.999))] = -torch.inf
        noise[rng.randrange(size)] = 1
    elif kind == "far":
        noise = noise * rng.choice((30, 300))
    elif kind == "steps":  # shares that are exact: a half, a quarter, …
        noise = -torch.randint(0, 12, (size,), generator=chance).double() * np.log(2)
    return noise * rng.choice((1, 1, 0.1, 4))


#: What narrows, and has no way of its own for one row.
RARE = {
    "top_h": (0.4, 1e-4, 1.0, 0.9),
    "typical_p": (0.2, 0.95, 1e-6, 0.9999999),
    "epsilon_cutoff": (3e-4, 0.1, 0.99),
    "eta_cutoff": (3e-4, 0.1, 0.99),
}


def settings_of(rng: random.Random) -> Settings:
    fields: dict[str, Any] = {"do_sample": rng.random() < 0.85, "seed": rng.getrandbits(40)}
    for name, values in {
        "temperature": (0.7, 1.5, 0.05, 1e-30, 20.0),
        "top_k": (1, 2, 5, 50, 1000, 1 << 20),
        "top_p": (0.95, 0.5, 0.999, 0.1, 1e-6, 0.0, 0.75, 0.9999999),
        "min_p": (0.05, 0.5, 1e-4, 1.0, 0.25),
        **(RARE if rng.random() < 0.1 else {}),
        "repetition_penalty": (1.1, 0.5, 30.0),
        "frequency_penalty": (0.5, -1.0),
        "presence_penalty": (0.3, -2.0),
    }.items():
        if rng.random() < 0.4:
            fields[name] = rng.choice(values)
    return Settings(max_new_tokens=1 << 20, **fields)


class Texts:
    """Sequences that come, grow, rest, become one another and go, in any order."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self.rng, self.size = rng, size
        self.all: list[RunningSequence] = []
        self.born = 0

    def tokens(self, most: int) -> list[int]:
        few = self.rng.random() < 0.7  # so that some come again
        size = min(self.size, 12) if few else self.size
        return [self.rng.randrange(size) for _ in range(self.rng.randint(1, most))]

    def turn(self) -> list[RunningSequence]:
        """Those of the next step."""
        while len(self.all) < 2 or self.rng.random() < 0.3:
            self.born += 1
            self.all.append(RunningSequence(self.born, self.tokens(40), settings_of(self.rng)))
        if len(self.all) > 2 and self.rng.random() < 0.2:
            self.all.remove(self.rng.choice(self.all))
        for one in self.all:
            what, before = self.rng.random(), len(one.tokens)
            if what < 0.7:
                list.extend(one.tokens, self.tokens(3))
            elif what < 0.8:
                one.tokens = Tokens([*one.tokens, *self.tokens(2)])
            elif what < 0.95:
                other = self.rng.choice(self.all)
                one.prompt_length, one.tokens = other.prompt_length, Tokens(other.tokens)
            if len(one.tokens) == before and what < 0.95:  # a text is not the same in two steps
                list.extend(one.tokens, self.tokens(2))
        self.rng.shuffle(self.all)
        return self.all[: self.rng.randint(1, len(self.all))]


def compared(rng: random.Random, size: int, steps: int, dtype: torch.dtype) -> int:
    """How many rows were compared in `steps` steps of one sampler; most drafts are right."""
    sampler, texts, count = Sampler(), Texts(rng, size), 0
    for _ in range(steps):
        own, rows, drafts, due = texts.turn(), [], [], []
        for sequence in own:
            drafts.append(list[int]())
            due.append(list[int]())
            for _ in range(rng.choice((1, 1, 4))):
                rows.append(row_of(rng, size).to(dtype))
                due[-1].append(reference.token(sequence, drafts[-1], rows[-1]))
                guess = due[-1][-1] if rng.random() < 0.9 else rng.randrange(size)
                drafts[-1].append(guess)
            drafts[-1].pop()
        found = sampler.choose(own, torch.stack(rows), drafts).gains()
        for sequence, mine, wanted, gain in zip(own, drafts, due, found, strict=True):
            right = next((n for n, t in enumerate(mine) if wanted[n] != t), len(mine))
            assert gain.error is None
            assert list(gain.tokens) == wanted[: 1 + right], (sequence.settings, dtype, size)
            count += 1 + right
    return count


@given(
    rng=st.integers(0, 1 << 30).map(random.Random),
    size=st.sampled_from(VOCABULARIES),
    dtype=st.sampled_from(DTYPES),
)
def test_every_token_is_the_references(rng: random.Random, size: int, dtype: torch.dtype) -> None:
    assert compared(rng, size, 4, dtype)


@pytest.mark.long
def test_thousands_of_rows_are_the_references() -> None:
    rng = random.Random(7)
    total = sum(
        compared(rng, size, 60, dtype) for size in (WIDE, 20_011, 151_936) for dtype in DTYPES
    )
    assert total > 2000


def kept_by(settings: Settings, logits: torch.Tensor) -> list[int] | None:
    """The tokens that can come, where these are told without a doubt."""
    scores = logits.numpy()
    one = OneRow.of(settings, len(scores))
    with np.errstate(all="ignore"):
        found = one.candidates(scores, float(scores.max())) if one.by_candidates else None
    if found is None:
        return None
    return np.flatnonzero(scores > -np.inf).tolist() if found[0] is None else found[0].tolist()


@given(seed=st.integers(0, 1 << 30), size=st.integers(1, 700), double=st.booleans())
def test_candidates_are_those_that_sorting_all_tokens_leaves(
    seed: int, size: int, double: bool
) -> None:
    """To the last one, where nothing is in doubt; a token at the very edge hardly ever comes."""
    rng, compared = random.Random(seed), 0
    for _ in range(8):
        logits = row_of(rng, size).to(torch.float64 if double else torch.float32)
        settings = settings_of(rng)
        found = kept_by(settings, logits)
        if found is not None:
            compared += 1
            due = reference.warped(logits[None], settings)[0]
            # What is as far away as this is nothing in float32, which sorts it out or not.
            certain = (due - due.max() > -80).nonzero()[:, 0].tolist()
            assert set(certain) <= set(found)
            assert set(found) <= set((due > -torch.inf).nonzero()[:, 0].tolist()) | {
                token for token in found if logits[token] - logits.max() < -80
            }
    assume(compared)  # where nothing ever is, hypothesis says so


def test_what_is_in_doubt_is_sorted() -> None:
    """A half, a quarter, an eighth …: three quarters end between two tokens, or just behind one."""
    logits = -torch.arange(WIDE).float() * float(np.log(2))
    exact = Settings(max_new_tokens=1, do_sample=True, top_p=0.75)
    assert kept_by(exact, logits) is None
    assert kept_by(exact._replace(top_p=0.76), logits) == [0, 1, 2]
    assert kept_by(exact._replace(top_p=1.0, min_p=0.5), logits) is None
    assert kept_by(exact._replace(top_p=1.0, min_p=0.49), logits) == [0, 1]
    one = OneRow.of(exact, WIDE)
    for seed in range(40):
        sequence = RunningSequence(0, [1], exact._replace(seed=seed))
        found = one.draw(logits.numpy(), 0.0, uniform(seed, 0, 1))
        assert found == reference.token(sequence, [], logits)


def test_few_rows_of_a_language_model_are_in_doubt() -> None:
    """What decides in them is the full sort; a shape of logits as real ones have."""
    chance = torch.Generator().manual_seed(3)
    told = Counter[bool]()
    for share in (0.8, 0.9, 0.95):
        settings = Settings(max_new_tokens=1, do_sample=True, top_p=share, temperature=0.8)
        for _ in range(20):
            ranks = torch.randperm(20_000, generator=chance)
            logits = 12 - 1.5 * (1 + ranks).log() + 0.3 * torch.randn(20_000, generator=chance)
            told[kept_by(settings, logits) is None] += 1
    assert told[True] <= 3


def test_each_token_is_read_once_however_rows_come_rest_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []

    def counted(tokens: list[int]) -> Counter[int]:
        read.append(len(tokens))
        return Counter(tokens)

    monkeypatch.setattr(histories, "Counter", counted)
    settings = Settings(max_new_tokens=99, repetition_penalty=1.1, presence_penalty=0.1)
    texts = [RunningSequence(n, range(n, n + 30), settings) for n in range(6)]
    sampler, rng = Sampler(), random.Random(1)
    for _ in range(40):
        step = rng.sample(texts, rng.randint(2, 6))  # two rest at times, or four
        sampler.choose(step, torch.randn(len(step), WIDE)).gains()
        for one in step:
            list.append(one.tokens, rng.randrange(64))
    sampler.choose(texts, torch.randn(6, WIDE)).gains()
    assert sum(read) == sum(len(one.tokens) + one.num_new for one in texts)
    texts[0].tokens = Tokens([*texts[0].tokens, 1])  # as a beam that became another
    sampler.choose(texts, torch.randn(6, WIDE)).gains()
    again = len(texts[0].tokens) + texts[0].num_new - 2
    assert sum(read) == again + sum(len(one.tokens) + one.num_new for one in texts)


def test_those_who_left_are_forgotten() -> None:
    settings = Settings(max_new_tokens=99, repetition_penalty=1.1)
    kept = histories.Histories(generated=False)
    for number in range(200):
        kept.of([RunningSequence(number, [1, 2], settings)])
        assert len(kept._known) <= 11


@given(seed=st.integers(0, 1 << 30))
def test_penalties_by_tables_of_the_vocabulary_are_those_by_histories(seed: int) -> None:
    """A GPU has the one, a CPU the other."""
    rng, block, size = random.Random(seed), StepBlock(torch.device("cpu")), 40
    table, history = TokenTable(size, torch.float32, block), histories.Histories(generated=True)
    seen, tokens = TokenTable(size, torch.bool, block), histories.Histories(generated=False)
    fields = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.25}
    texts = [RunningSequence(n, [1, n + 2], Settings(99, **fields)) for n in range(3)]
    changed = False
    for _ in range(4):
        for one in texts:
            list.extend(one.tokens, [rng.randrange(size) for _ in range(rng.randint(0, 4))])
        drafts = [[rng.randrange(size) for _ in range(rng.randint(0, 3))] for _ in texts]
        rows = RowMap.verifying(texts, drafts)
        asked = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        scores = torch.randn(len(rows), size)
        for penalty, ways in (
            (penalties.repetition(rows, asked, block), (seen, tokens)),
            (penalties.counted(rows, asked, block), (table, history)),
        ):
            one, other = (penalty.stage(rows, way, block)(scores.clone()) for way in ways)
            assert torch.equal(one, other)
            changed |= not torch.equal(one, scores)
    assert changed


WORD = st.integers(-(1 << 70), 1 << 70)


@given(st.lists(st.tuples(WORD, WORD, WORD), min_size=1, max_size=20))
def test_many_random_numbers_are_those_of_each(keys: list[tuple[int, int, int]]) -> None:
    assert uniforms(keys).tolist() == [uniform(*key) for key in keys]


def test_many_rows_draw_what_each_draws_alone() -> None:
    rng = random.Random(2)
    texts = [RunningSequence(n, [1 + n], settings_of(rng)) for n in range(3 * MANY)]
    logits = torch.randn(len(texts), 50, generator=torch.Generator().manual_seed(0)) * 3
    found = Sampler().choose(texts, logits.clone()).gains()
    due = [reference.token(one, [], row) for one, row in zip(texts, logits, strict=True)]
    assert [gain.tokens for gain in found] == [(token,) for token in due]

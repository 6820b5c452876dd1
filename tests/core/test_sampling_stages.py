"""The sampler's stages one by one, and that a row is in company what it is alone, bit by bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_settings import random_fields

from jackfield.contracts import Sequence, Settings, StepBlock
from jackfield.contracts.settings import Structure
from jackfield.sampling import min_length, penalties, warpers
from jackfield.sampling.bias import phrases, single_tokens
from jackfield.sampling.drawing import draw
from jackfield.sampling.pipeline import Pipeline, Tables
from jackfield.sampling.processors import Outcome
from jackfield.sampling.rows import RowMap
from jackfield.sampling.stage import Stage
from jackfield.sampling.structured import unpacked
from jackfield.sampling.token_mask import apply_token_mask, mask
from jackfield.sampling.token_table import TokenTable
from jackfield.sampling.verification import gains

VOCAB = 40
CPU = torch.device("cpu")


def sequence(tokens: list[int], prompt: int | None = None, **fields: Any) -> Sequence:
    found = Sequence(0, tokens, Settings(max_new_tokens=99, **fields))
    found.prompt_length = len(tokens) if prompt is None else prompt
    return found


def scores(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def column(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


PURE: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "temperature": (warpers.divide, (column(0.5, 1.5),)),
    "top-k": (
        lambda s, k: warpers.keep_top_k(s, k, 7), (column(3, 7, dtype=torch.long),)
    ),
    "top-p": (warpers.keep_top_p, (column(0.3, 0.9),)),
    "min-p": (warpers.keep_min_p, (column(0.1, 0.4),)),
    "repetition": (
        penalties.penalize_repetition, (column(1.5, 0.7), torch.ones(2, VOCAB, dtype=torch.bool))
    ),
    "counts": (
        penalties.penalize_counts, (column(0.5, 0), column(0, -0.5), torch.ones(2, VOCAB))
    ),
    "token mask": (apply_token_mask, (torch.arange(2 * VOCAB).view(2, VOCAB) % 3 == 0,)),
    "draw": (draw, (column(0.2, 0.9, dtype=torch.float64),)),
}  # fmt: skip


@pytest.mark.parametrize("name", PURE)
def test_a_stage_changes_nothing_that_it_is_handed(name: str) -> None:
    act, values = PURE[name]
    given, handed = scores(2), [value.clone() for value in values]
    found = act(given, *handed)
    assert torch.equal(given, scores(2))
    assert all(map(torch.equal, handed, values))
    assert not torch.equal(found, given[: len(found)])


@pytest.mark.parametrize("name", sorted(set(PURE) - {"draw"}))
def test_rows_that_ask_for_nothing_are_not_looked_at(name: str) -> None:
    act, values = PURE[name]
    seen: list[torch.Size] = []

    def spy(part: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        seen.append(part.shape)
        return act(part, *own)

    stage = Stage(spy, values, torch.tensor([4, 1]))
    given, expected = scores(6), scores(6)
    expected[[4, 1]] = act(expected[[4, 1]], *values)
    assert stage.in_place
    assert stage(given) is given
    assert torch.equal(given, expected)
    assert seen == [(2, VOCAB)]
    assert not Stage(spy, values).in_place


def test_one_row_of_eight_is_all_that_is_warped() -> None:
    asked: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.5}
    rows = [sequence([n], do_sample=n > 1, **(asked if n == 6 else {})) for n in range(8)]
    sampled = pipeline(rows).settled.sampled
    assert sampled is not None
    assert sampled.asked == (2, 3, 4, 5, 6, 7)
    assert sampled.warpers.temperature is not None
    for stage in (sampled.warpers.temperature, *sampled.warpers.narrowing):
        assert stage.rows is not None
        assert stage.rows.tolist() == [4]
        assert [value.shape for value in stage.values] == [(1, 1)]
    assert len(sampled.warpers.narrowing) == 3
    assert sampled.warpers.narrowing[0].act.keywords == {"most": 5}  # type: ignore[attr-defined]


def pipeline(
    sequences: list[Sequence], drafts: list[list[int]] | None = None, **kept: Any
) -> Pipeline:
    rows, block = RowMap.verifying(sequences, drafts), kept.pop("block", StepBlock(CPU))
    return Pipeline.of(rows, VOCAB, block, **kept)


def fields_of(rng: random.Random) -> dict[str, Any]:
    def third(ids: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given[:, ids.shape[1] % VOCAB] += 3
        return given

    def fails(ids: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] % 5 == 0:
            raise ValueError("no")
        return given

    bias = {(token,): rng.choice([rng.uniform(-3, 3), -math.inf]) for token in range(3)}
    bias |= {(one, 4): rng.uniform(-4, 4) for one in range(VOCAB)}
    bias |= {(one, other, 4): rng.uniform(-4, 4) for one in range(5) for other in range(VOCAB)}
    own = {
        "sequence_bias": bias, "min_new_tokens": rng.randint(1, 9),
        "logits_processor": rng.choice([(third,), (third, third), (fails,)]),
        "structure": Structure("regex", "x"),
    }  # fmt: skip
    return random_fields(rng, rng.choice([0, 3, 8]), (3, 5), own)


def bits(rows: RowMap, rng: random.Random) -> torch.Tensor | None:
    count = len(rows.asking(lambda s: s.structure is not None))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = (count, -(-VOCAB // 32))
    found = torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, generator=generator)
    return found if count else None


def step(found: Pipeline, logits: torch.Tensor, allowed: torch.Tensor | None) -> list[Any]:
    """Of each row: its processed scores, what it draws from, and its token; then what failed."""
    found = found.masked(allowed)
    before = logits.clone()
    given, outcome = found.processed(logits)
    assert torch.equal(logits.nan_to_num(9e9), before.nan_to_num(9e9))
    tokens, best, again = found.choose(logits.clone())
    assert again.failures.keys() == outcome.failures.keys()
    masked = given.clone() if found.choosing.mask is None else found.choosing.mask(given.clone())
    sampled, drawn_from = found.settled.sampled, {}
    if sampled is not None:
        warped = sampled.warpers(sampled.pick(masked).clone())
        drawn_from = dict(zip(sampled.asked, warped.tolist(), strict=True))
    return [
        (
            str(given[row].tolist()), str(drawn_from.get(row)), str(best[row]),
            outcome.failures.get(row),
            None if row in drawn_from and math.isnan(float(best[row])) else int(tokens[row]),
        )
        for row in range(len(found.rows))
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_row_is_bit_by_bit_what_it_is_alone(seed: int) -> None:
    """Whatever its neighbours ask for, with what is kept from step to step and without."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    pool = [
        sequence([rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))], **fields_of(rng))
        for _ in range(rng.randint(2, 9))
    ]
    block, last, batch = StepBlock(CPU), None, pool
    tables: Tables = {}
    for _ in range(5):
        if rng.random() < 0.5:
            batch = rng.sample(pool, rng.randint(1, len(pool)))
        drafts = [[rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3]))] for _ in batch]
        last = pipeline(batch, drafts, block=block, tables=tables, before=last)
        rows = last.rows
        logits = 3 * torch.randn(len(rows), VOCAB, generator=generator, dtype=torch.float64)
        logits[rng.randrange(len(rows)), 7] = rng.choice([0, 0, math.nan])
        logits, allowed = logits.to(dtype), bits(rows, rng)
        found, at, bit = step(last, logits, allowed), 0, 0
        for s, own in zip(batch, drafts, strict=True):
            end = at + 1 + len(own)
            mine = None
            if s.settings.structure is not None and allowed is not None:
                mine, bit = allowed[bit : bit + end - at], bit + end - at
            assert step(pipeline([s], [own]), logits[at:end], mine) == found[at:end]
            at = end
            list.extend(s.tokens, [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))])


def test_a_table_reads_what_is_new_and_nothing_else() -> None:
    """Sequences come, go, change places, grow, and lose their last tokens."""
    rng, block = random.Random(1), StepBlock(CPU)
    read: list[int] = []
    put = block.put
    block.put = lambda given, *own: (read.append(len(given[1])), put(given, *own))[1]  # type: ignore[method-assign]
    pool = [sequence([rng.randrange(VOCAB) for _ in range(50)], prompt=20) for _ in range(6)]
    for dtype in (torch.bool, torch.float32):
        table, known = TokenTable(VOCAB, dtype, block), dict[int, int]()
        for _ in range(60):
            own = rng.sample(pool, rng.randint(0, 6))
            read.clear()
            found = table.of(own)
            start = 0 if dtype == torch.bool else 20
            expected = torch.zeros(len(own), VOCAB)
            for row, s in enumerate(own):
                for token in s.tokens[start:]:
                    expected[row, token] += 1
            assert torch.equal(found.float(), expected.clamp(max=1) if start == 0 else expected)
            assert sum(known.get(id(s), start) <= len(s.tokens) for s in own) or not own
            new = sum(
                len(s.tokens) - (n if (n := known.get(id(s), start)) <= len(s.tokens) else start)
                for s in own
            )
            assert new == 0 or read[-1] == new
            known = {id(s): len(s.tokens) for s in own}
            for s in pool:
                if rng.random() < 0.5:
                    list.append(s.tokens, rng.randrange(VOCAB))
                elif rng.random() < 0.1:
                    s.tokens = s.tokens[:-1]


def test_what_settings_ask_for_is_worked_out_once() -> None:
    one, two, block = sequence([1], top_k=3, do_sample=True), sequence([2]), StepBlock(CPU)
    first = pipeline([one, two], [[5], []], block=block)
    list.append(one.tokens, 5)
    then = pipeline([one, two], [[6], []], block=block, before=first)
    assert then.settled is first.settled
    assert then.choosing.numbers is not first.choosing.numbers
    assert pipeline([one, two], block=block, before=first).settled is not first.settled
    assert pipeline([two, one], [[], [6]], block=block, before=first).settled is not first.settled


@pytest.mark.parametrize(
    ("fields", "lasts"),
    [
        ({}, True),
        ({"logprobs": 2}, True),
        ({"min_new_tokens": 3, "eos_token_ids": (4,)}, False),
        ({"sequence_bias": {(9, 4): 5.0}}, False),  # no stage of it until a text ends with 9
        ({"sequence_bias": {(4,): 5.0}}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"presence_penalty": 0.5}, False),
        ({"do_sample": True}, False),
        ({"output_scores": True}, False),
        ({"logits_processor": (lambda ids, s: s,)}, False),
        ({"guidance_scale": 2.0}, False),
    ],
)
def test_what_lasts_asks_nothing_of_tokens(fields: dict[str, Any], lasts: bool) -> None:
    one = sequence([1, 2], **fields)
    made = pipeline([one])
    assert made.lasts is lasts
    list.append(one.tokens, 9)
    assert made.rows.fits([one], None, grown=made.lasts) is lasts
    assert not made.rows.fits([one], [[5]], grown=True)
    assert not made.rows.fits([one, one], None, grown=True)


def test_drafts_before_a_row_count_as_its_tokens() -> None:
    asked = {"frequency_penalty": 1.0, "repetition_penalty": 2.0}
    rows = [sequence([9]), sequence([9, 4], prompt=1, **asked), sequence([5], **asked)]
    found, _ = pipeline(rows, [[4], [4, 4, 6], []]).processed(-torch.ones(7, VOCAB))
    assert (found[:2] == -1).all()
    assert found[2:6, 4].tolist() == [-3, -4, -5, -5]
    assert found[2:6, 6].tolist() == [-1, -1, -1, -3]
    assert found[2:, 9].tolist() == [-2, -2, -2, -2, -1]
    assert found[2:, 5].tolist() == [-1, -1, -1, -1, -2]


def test_biases_of_one_place_are_added_one_after_another() -> None:
    bias = {(4,): 0.1, (7, 4): 0.2, (9, 7, 4): 0.3, (5, 4): 9.0, (3, 3, 3, 3, 3, 3, 3, 4): 9.0}
    rows = RowMap.verifying([sequence([9, 7], sequence_bias=bias)], [[5]])
    block, found = StepBlock(CPU), torch.zeros(2, VOCAB, dtype=torch.float64)
    single, behind = single_tokens(rows, (0, 1), block), phrases(rows, (0, 1), block)
    assert single is not None
    assert behind is not None
    assert behind(single(found)) is found
    first = float(torch.tensor(0.1)) + 0.2 + 0.3
    assert found[:, 4].tolist() == [first, float(torch.tensor(0.1)) + 9.0]
    assert found.count_nonzero() == 2
    assert [len(values) for *_, values in behind.rounds] == [2, 1]
    assert single_tokens(RowMap.verifying([sequence([1])]), (0,), block) is None


def test_the_end_is_forbidden_where_a_row_is_too_short() -> None:
    rows = RowMap.verifying([sequence([1, 2, 3], 2, min_new_tokens=3, eos_token_ids=(4, 6))],
                            [[5, 5, 5]])  # fmt: skip
    stage = min_length.stage(rows, range(4), StepBlock(CPU))
    assert stage is not None
    found = stage(torch.zeros(4, VOCAB))
    assert (found == -math.inf).nonzero().tolist() == [[0, 4], [0, 6], [1, 4], [1, 6]]
    assert min_length.stage(rows, (2, 3), StepBlock(CPU)) is None


def test_a_mask_is_for_the_rows_with_a_structure() -> None:
    shaped = sequence([1], structure=Structure("regex", "x"))
    rows = RowMap.verifying([sequence([1]), shaped, sequence([2])], [[], [5], []])
    allowed = torch.tensor([[0b101, 1], [1 << 30, 0]], dtype=torch.int32)
    found = mask(allowed, rows, VOCAB, StepBlock(CPU))
    kept = found(torch.zeros(4, VOCAB)) == 0
    assert kept[[0, 3]].all()
    assert kept[1].nonzero()[:, 0].tolist() == [0, 2, 32]
    assert kept[2].nonzero()[:, 0].tolist() == [30]
    assert found.only(0) is None
    second = found.only(2)
    assert second is not None
    assert (second(torch.zeros(1, VOCAB)) == 0).nonzero().tolist() == [[0, 30]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 500])
def test_a_mask_of_a_cpu_is_that_of_a_gpu_also_for_what_is_no_number(
    dtype: torch.dtype, width: int
) -> None:
    chance = torch.Generator().manual_seed(width)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 3e38, -1.5], dtype=dtype)
    given = odd[torch.randint(0, len(odd), (3, width), generator=chance)]
    words = -(-width // 32) + 1  # a tokenizer may know more tokens than the model
    bits = torch.randint(-(1 << 31), 1 << 31, (3, words), generator=chance).to(torch.int32)
    rows = RowMap.verifying([sequence([n], structure=Structure("regex", "x")) for n in range(3)])
    found = mask(bits, rows, width, StepBlock(CPU))(given.clone())
    due = apply_token_mask(given, ~unpacked(bits, width))
    assert found.dtype == dtype
    assert torch.equal(found.nan_to_num(7e4), due.nan_to_num(7e4))
    assert torch.equal(found.isnan(), due.isnan())
    assert found.isnan().any() or width < 31


def test_rows_of_a_map() -> None:
    one, two = sequence([1, 2]), sequence([3])
    rows = RowMap.verifying([one, two], [[7, 8], []])
    assert (rows.owners, rows.depths, len(rows)) == ((0, 0, 0, 1), (0, 1, 2, 0), 4)
    assert [list(rows.of(i)) for i in range(2)] == [[0, 1, 2], [3]]
    assert [rows.tail(row, 3) for row in range(4)] == [[1, 2], [1, 2, 7], [2, 7, 8], [3]]
    assert list(rows.before(2)) == [7, 8]
    last = RowMap.drafting([one, two], [[7, 8], []])
    assert (last.owners, last.depths, last.tail(0, 2)) == ((0, 1), (2, 0), [7, 8])
    assert rows.fits([one, two], [(7, 8), ()])
    assert not rows.fits([one, two], [[7, 9], []])
    assert not rows.fits([two, one], [[7, 8], []])
    assert not rows.fits([one, two], None)
    assert RowMap.verifying([one, two]).fits([one, two], [[], []])
    list.append(one.tokens, 7)
    assert not rows.fits([one, two], [[7, 8], []])
    assert rows.pick([2, 3]).depths == (2, 0)


@pytest.mark.parametrize(
    ("tokens", "outcome", "expected"),
    [
        ([7, 8, 9], Outcome(), ((7, 8, 9), None)),
        ([7, 6, 9], Outcome(), ((7, 6), None)),
        ([5, 8, 9], Outcome(), ((5,), None)),
        ([7, 8, 9], Outcome(reached={0: 1}), ((7, 8), None)),
        ([7, 8, 9], Outcome({0: "bad"}, {0: 0}), ((), "bad")),
        ([7, 8, 9], Outcome({1: "bad"}, {0: 1}), ((7,), None)),
    ],
)
def test_a_sequence_gains_what_its_drafts_foresaw(
    tokens: list[int], outcome: Outcome, expected: tuple[Any, ...]
) -> None:
    rows = RowMap.verifying([sequence([1])], [[7, 8]])
    (found,) = gains(rows, [[token, 0.5] for token in tokens], outcome)
    assert (found.tokens, found.error) == expected

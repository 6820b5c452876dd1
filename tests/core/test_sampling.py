"""The sampler against exact distributions, and each stage against transformers' own processors."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from random_settings import random_fields
from scipy import stats

from jackfield.contracts import Accepted, Settings, StepBlock
from jackfield.contracts.counter_rng import uniform
from jackfield.engine.sequences import RunningSequence
from jackfield.sampling.pipeline import Pipeline
from jackfield.sampling.rows import RowMap
from jackfield.sampling.sampler import Sampler

ROWS = 4000
LOGITS = torch.tensor([1.5, 0.3, -0.7, 2.0, 0.0, -2.5, 0.9, 1.1], dtype=torch.float64)


def sequence(prompt: list[int] | None = None, new: list[int] | None = None, **fields: Any):
    found = RunningSequence(0, prompt or [1], Settings(max_new_tokens=50, **fields))
    found.tokens = [*found.tokens, *(new or [])]
    return found


def sample(sequences: list[RunningSequence], logits: torch.Tensor) -> list[Accepted]:
    return Sampler().choose(sequences, logits.clone()).gains()


def token(accepted: Accepted) -> int:
    assert accepted.error is None
    (found,) = accepted.tokens
    return found


def distribution(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The exact target, from the definitions of the papers, without any of our code."""
    weights = np.exp((logits - logits.max()) / temperature)
    if top_k:
        weights[np.argsort(-weights)[top_k:]] = 0
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p * weights.sum()]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.4, "top_k": 6, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 7, "top_p": 0.95, "min_p": 0.25},
        {"temperature": 0.5, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_follow_the_exact_distribution(fields: dict[str, Any], dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    rows = [sequence(do_sample=True, seed=seed, **fields) for seed in range(ROWS)]
    drawn = [token(a) for a in sample(rows, logits.expand(ROWS, -1))]
    expected = distribution(logits.double().numpy(), **fields)
    counts = np.bincount(drawn, minlength=len(expected))
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert stats.chisquare(counts[kept], ROWS * expected[kept]).pvalue > 1e-3


def test_positions_of_one_seed_follow_the_distribution_too() -> None:
    rows = [sequence(new=[1] * n, do_sample=True, seed=5) for n in range(2000)]
    drawn = [token(a) for a in sample(rows, LOGITS.expand(len(rows), -1))]
    counts = np.bincount(drawn, minlength=8)
    assert stats.chisquare(counts, len(rows) * distribution(LOGITS.numpy())).pvalue > 1e-3


def test_uniform_is_uniform_and_its_keys_independent() -> None:
    by_seed = np.array([uniform(seed, 0, 7) for seed in range(5000)])
    by_position = np.array([uniform(3, 0, position) for position in range(5000)])
    by_sample = np.array([uniform(3, sample, 7) for sample in range(5000)])
    for numbers in (by_seed, by_position, by_sample):
        assert ((numbers >= 0) & (numbers < 1)).all()
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
        assert len(set(numbers)) == len(numbers)
    for one, other in ((by_seed, by_position), (by_seed, by_sample), (by_position, by_sample)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    assert uniform(1, 2, 3) != uniform(2, 1, 3) != uniform(3, 2, 1)
    assert 0 <= uniform(-1, 0, 0) < 1


BIAS = {(3,): 1.5, (4,): -2.0, (5, 6): 3.0, (9, 5, 7): -1.0, (8, 6): 9.0, (5, 6, 1): 2.0}
P = transformers.generation.logits_process
PROCESSORS = {
    "repetition": (
        {"repetition_penalty": 1.7},
        lambda: P.RepetitionPenaltyLogitsProcessor(1.7),
    ),
    "encouraged repetition": (
        {"repetition_penalty": 0.6},
        lambda: P.RepetitionPenaltyLogitsProcessor(0.6),
    ),
    "bias": ({"sequence_bias": BIAS}, lambda: P.SequenceBiasLogitsProcessor(BIAS)),
    "bad words": (
        {"sequence_bias": {(3,): -math.inf, (5, 6): -math.inf, (8, 6): -math.inf}},
        lambda: P.NoBadWordsLogitsProcessor([[3], [5, 6], [8, 6], [2]], eos_token_id=2),
    ),
    "minimum length": (
        {"min_new_tokens": 4, "eos_token_ids": (2, 11)},
        lambda: P.MinNewTokensLengthLogitsProcessor(4, 4, [2, 11]),
    ),
    "minimum length reached": (
        {"min_new_tokens": 3, "eos_token_ids": (2, 11)},
        lambda: P.MinNewTokensLengthLogitsProcessor(4, 3, [2, 11]),
    ),
    "temperature": ({"temperature": 0.37}, lambda: P.TemperatureLogitsWarper(0.37)),
    "top-k": ({"top_k": 5}, lambda: P.TopKLogitsWarper(5)),
    "top-k of all": ({"top_k": 5000}, lambda: P.TopKLogitsWarper(5000)),
    "top-p": ({"top_p": 0.81}, lambda: P.TopPLogitsWarper(0.81)),
    "tiny top-p": ({"top_p": 1e-4}, lambda: P.TopPLogitsWarper(1e-4)),
    "min-p": ({"min_p": 0.13}, lambda: P.MinPLogitsWarper(0.13)),
    "top-h": ({"top_h": 0.6}, lambda: P.TopHLogitsWarper(0.6)),
    "tiny top-h": ({"top_h": 1e-3}, lambda: P.TopHLogitsWarper(1e-3)),
    "typical": ({"typical_p": 0.7}, lambda: P.TypicalLogitsWarper(0.7)),
    "tiny typical": ({"typical_p": 1e-4}, lambda: P.TypicalLogitsWarper(1e-4)),
    "epsilon": ({"epsilon_cutoff": 0.03}, lambda: P.EpsilonLogitsWarper(0.03)),
    "great epsilon": ({"epsilon_cutoff": 0.99}, lambda: P.EpsilonLogitsWarper(0.99)),
    "eta": ({"eta_cutoff": 0.2}, lambda: P.EtaLogitsWarper(0.2)),
    "great eta": ({"eta_cutoff": 0.99}, lambda: P.EtaLogitsWarper(0.99)),
}


def pipeline(sequences: list[RunningSequence], logits: torch.Tensor) -> Pipeline:
    return Pipeline.of(RowMap.verifying(sequences), logits.shape[-1], StepBlock(logits.device))


def processed(sequences: list[RunningSequence], logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of what each row draws from."""
    found = pipeline(sequences, logits)
    assert found.settled.sampled is not None
    return found.settled.sampled.warpers(found.processed(logits)[0]).log_softmax(-1)


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_stage_equals_the_processor_of_transformers(name: str) -> None:
    fields, make = PROCESSORS[name]
    logits = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(2)).double()
    prompt, new = [1, 9, 8, 9], [9, 9, 5]
    expected = make()(torch.tensor([prompt + new]).expand(40, -1), logits.clone()).log_softmax(-1)
    rows = [sequence(prompt, new, do_sample=True, **fields) for _ in range(40)]
    found = processed(rows, logits)
    assert torch.equal(found == -math.inf, expected == -math.inf)
    assert torch.allclose(found, expected, atol=1e-6)
    assert name.endswith(("reached", "of all")) or not torch.allclose(found, logits.log_softmax(-1))


def test_a_chain_equals_the_chain_of_transformers() -> None:
    logits = 3 * torch.randn(60, 30, generator=torch.Generator().manual_seed(3)).double()
    prompt, new = [1, 9, 8, 9], [9, 9, 5]
    chain = transformers.LogitsProcessorList(
        [
            P.SequenceBiasLogitsProcessor(BIAS),
            P.RepetitionPenaltyLogitsProcessor(1.3),
            P.MinNewTokensLengthLogitsProcessor(4, 9, [2]),
            P.TemperatureLogitsWarper(1.9),
            P.TopHLogitsWarper(0.9),
            P.TopKLogitsWarper(20),
            P.TopPLogitsWarper(0.9),
            P.MinPLogitsWarper(0.05),
            P.TypicalLogitsWarper(0.95),
            P.EpsilonLogitsWarper(0.02),
            P.EtaLogitsWarper(0.3),
        ]
    )
    expected = chain(torch.tensor([prompt + new]).expand(60, -1), logits.clone()).log_softmax(-1)
    fields = {
        "sequence_bias": BIAS,
        "repetition_penalty": 1.3,
        "min_new_tokens": 9,
        "eos_token_ids": (2,),
        "temperature": 1.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_h": 0.9,
        "typical_p": 0.95,
        "epsilon_cutoff": 0.02,
        "eta_cutoff": 0.3,
    }
    found = processed([sequence(prompt, new, do_sample=True, **fields) for _ in range(60)], logits)
    assert torch.equal(found == -math.inf, expected == -math.inf)
    assert torch.allclose(found, expected, atol=1e-6)


def summed_as_a_gpu_does(
    self: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """In the dtype of the result, where a processor sums float32 in float64."""
    kind = np.dtype(str(dtype or self.dtype).removeprefix("torch."))
    return torch.from_numpy(np.cumsum(self.numpy(), dim, dtype=kind))


def test_top_p_keeps_the_same_tokens_however_a_device_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a large vocabulary and a flat distribution, where sums in float32 are furthest off."""
    top_p = 0.5
    generator = torch.Generator().manual_seed(1)
    logits = 0.01 * torch.randn(3, 151_936, generator=generator)
    rows = [sequence(do_sample=True, top_p=top_p) for _ in range(3)]

    def kept() -> torch.Tensor:
        return processed(rows, logits.clone()) > -math.inf

    def theirs() -> torch.Tensor:
        ids = torch.zeros(3, 1, dtype=torch.long)
        return P.TopPLogitsWarper(top_p)(ids, logits.clone()) > -math.inf

    ours, expected = kept(), theirs()
    assert torch.equal(ours, expected)
    monkeypatch.setattr(torch.Tensor, "cumsum", summed_as_a_gpu_does)
    assert torch.equal(kept(), ours)
    assert not torch.equal(theirs(), expected)  # which is what would be lost


def test_presence_and_frequency_count_new_tokens_only() -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(4)).double()
    rows = [
        sequence([0, 1, 1], [2, 2, 3], presence_penalty=0.5, frequency_penalty=0.25),
        sequence([0, 1, 1], [4], presence_penalty=-1.0),
    ]
    counts = torch.tensor([[0, 0, 2, 1, 0, 0], [0, 0, 0, 0, 1, 0]])
    expected = logits.clone()
    expected[0] -= 0.25 * counts[0] + 0.5 * (counts[0] > 0)
    expected[1] += 1.0 * (counts[1] > 0)
    assert torch.allclose(pipeline(rows, logits).processed(logits)[0], expected)


def fields_of(rng: random.Random) -> dict[str, Any]:
    bias = {(rng.randrange(20),): rng.uniform(-3, 3), (4, rng.randrange(20)): 5.0}
    return random_fields(rng, 6, (3,), {"sequence_bias": bias, "min_new_tokens": 30})


@pytest.mark.parametrize("seed", range(8))
def test_a_row_is_what_it_is_alone_for_many_steps(seed: int) -> None:
    rng = random.Random(seed)
    fields = [fields_of(rng) for _ in range(9)]
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.randn(9, 20, generator=generator) * 3 for _ in range(6)]
    together = [sequence([4, 5], **f) for f in fields]
    alone = [sequence([4, 5], **f) for f in fields]
    sampler, samplers = Sampler(), [Sampler() for _ in fields]
    for logits in steps:
        for row, accepted in enumerate(sampler.choose(together, logits.clone()).gains()):
            (expected,) = samplers[row].choose([alone[row]], logits[row : row + 1].clone()).gains()
            assert accepted.tokens == expected.tokens
            assert [p.token_id for p in accepted.logprobs] == [
                p.token_id for p in expected.logprobs
            ]
            together[row].extend(accepted)
            alone[row].extend(expected)


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 3.0}, {"frequency_penalty": 1.0}, {"presence_penalty": 1.0}],
    ids=str,
)
def test_rows_that_leave_or_change_places_keep_their_history(fields: dict[str, float]) -> None:
    rows = [sequence([1], **fields) for _ in range(3)]
    sampler = Sampler()
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    orders = [[0, 1, 2], [0, 1, 2], [2, 0], [0, 2], [0]]
    for order in orders:
        fresh = [token(a) for a in sample([rows[i] for i in order], logits[order])]
        found = sampler.choose([rows[i] for i in order], logits[order].clone())
        kept = [token(gain) for gain in found.gains()]
        assert kept == fresh
        for i, chosen in zip(order, kept, strict=True):
            rows[i].extend(Accepted([chosen]))


@pytest.mark.parametrize(("number", "expected"), [(0.0, 2), (1 - 2**-53, 5)])
def test_the_ends_of_the_unit_interval_draw_no_forbidden_token(
    number: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jackfield.sampling.choosing.uniform", lambda *key: number)
    never = {(i,): -math.inf for i in (0, 1, 6, 7)}
    row = sequence(do_sample=True, sequence_bias=never)
    assert token(sample([row], LOGITS[None])[0]) == expected


def test_greedy_and_sampled_rows_mix() -> None:
    rows = [sequence(do_sample=i % 2 == 1, temperature=50.0, seed=i) for i in range(400)]
    drawn = [token(a) for a in sample(rows, LOGITS.expand(400, -1))]
    assert set(drawn[::2]) == {3}
    assert set(drawn[1::2]) == set(range(8))


@pytest.mark.parametrize("width", [7, 50, 5000])
def test_which_of_equal_tokens_is_told_is_nobody_elses_wish(width: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randint(0, 4, (3, width), generator=drawn).float()
        (alone,) = sample([sequence(logprobs=2)], logits[:1])
        together = sample([sequence(logprobs=2), sequence(logprobs=5), sequence()], logits)
        assert together[0].logprobs == alone.logprobs
        best = (logits[0] == logits[0].max()).nonzero()[:2, 0].tolist()
        assert [i for i, _ in alone.logprobs[0].top][: len(best)] == best


@pytest.mark.parametrize("do_sample", [False, True])
def test_logprobs_are_those_of_the_raw_logits(do_sample: bool) -> None:
    row = sequence(
        [3, 3], do_sample=do_sample, temperature=0.3, top_k=2, repetition_penalty=5.0,
        sequence_bias={(6,): 4.0}, logprobs=4,
    )  # fmt: skip
    mate = sequence([3], logprobs=0)
    unasked = sequence([3])
    found, plain, none = sample([row, mate, unasked], LOGITS.expand(3, -1))
    expected = LOGITS.log_softmax(-1)
    (entry,) = found.logprobs
    assert entry.token_id == token(found) != 3
    assert entry.logprob == pytest.approx(float(expected[entry.token_id]))
    assert [i for i, _ in entry.top] == expected.topk(4).indices.tolist()
    assert [v for _, v in entry.top] == pytest.approx(expected.topk(4).values.tolist())
    assert plain.logprobs[0].logprob == pytest.approx(float(expected[3]))
    assert plain.logprobs[0].top == ()
    assert none.logprobs == ()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("where", [0, 5, 7])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_of_their_row(
    broken: float, where: int, do_sample: bool
) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, where] = broken
    rows = [sequence(do_sample=do_sample, seed=seed) for seed in range(3)]
    found = sample(rows, logits)
    assert "not numbers" in (found[1].error or "")
    assert found[1].tokens == ()
    for i in (0, 2):
        assert token(found[i]) == token(sample([rows[i]], LOGITS[None])[0])


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_row_whose_tokens_are_all_forbidden_errs_alone(do_sample: bool) -> None:
    never = {(i,): -math.inf for i in range(8)}
    rows = [
        sequence(do_sample=do_sample, seed=1, top_p=0.5, top_k=3, min_p=0.1, temperature=0.5),
        sequence(do_sample=do_sample, seed=2, sequence_bias=never, top_k=3),
    ]
    found = sample(rows, LOGITS.repeat(2, 1))
    assert "forbid every token" in (found[1].error or "")
    assert token(found[0]) == token(sample(rows[:1], LOGITS[None])[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-39, 1e-4])
def test_a_tiny_temperature_is_the_greedy_limit(temperature: float, dtype: torch.dtype) -> None:
    rows = [sequence(do_sample=True, seed=s, temperature=temperature) for s in range(20)]
    assert {token(a) for a in sample(rows, LOGITS.to(dtype).expand(20, -1))} == {3}


@pytest.mark.parametrize("top_k", [8, 9, 10**6, 10**30])
def test_a_top_k_beyond_the_vocabulary_keeps_everything(top_k: int) -> None:
    rows = [sequence(do_sample=True, seed=s, top_k=top_k) for s in range(200)]
    plain = [sequence(do_sample=True, seed=s) for s in range(200)]
    found = sample(rows, LOGITS.expand(200, -1))
    assert [token(a) for a in found] == [token(a) for a in sample(plain, LOGITS.expand(200, -1))]


def test_no_end_to_forbid_before_the_minimum_length() -> None:
    (found,) = sample([sequence(min_new_tokens=5)], LOGITS[None])
    assert token(found) == 3


@pytest.mark.parametrize(("value", "expected"), [(-math.inf, 0), (1e38, 5), (-1e38, 0)])
def test_extreme_biases_do_what_they_say(value: float, expected: int) -> None:
    bias = {(3,): value} if value < 0 else {(5,): value}
    for do_sample in (False, True):
        row = sequence(do_sample=do_sample, top_k=1, sequence_bias=bias, seed=1)
        assert token(sample([row], LOGITS[None])[0]) == expected

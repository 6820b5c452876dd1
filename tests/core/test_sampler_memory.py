"""What is left free for the sampler bounds what it takes, whatever is asked of it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch

from jackfield.bridge.dry_run import _Watch
from jackfield.contracts import Settings
from jackfield.engine.sequences import RunningSequence
from jackfield.planning.memory import sampled_bytes
from jackfield.sampling.choosing import WIDE
from jackfield.sampling.sampler import Sampler

#: Rows and vocabulary: where rows are done all at once, and where a CPU does one by one.
AT_ONCE, ONE_BY_ONE = (40, WIDE // 2), (4, 20_000)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "log-probabilities": {"logprobs": 5},
    "temperature": {"do_sample": True, "temperature": 0.7},
    "top-k": {"do_sample": True, "top_k": 50},
    "large top-k": {"do_sample": True, "top_k": AT_ONCE[1] - 1},
    "top-p": {"do_sample": True, "top_p": 0.9},
    "min-p": {"do_sample": True, "min_p": 0.05},
    "repetition": {"repetition_penalty": 1.2},
    "presence": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"sequence_bias": {(3,): 1.0, (4, 5): 1.0}},
}
SETTINGS["all"] = {k: v for own in SETTINGS.values() for k, v in own.items()}


def peak(
    dtype: torch.dtype, drafts: int, settings: dict[str, Any], size: tuple[int, int] = AT_ONCE
) -> float:
    """The bytes for each logit, itself included, of the second of two steps; numpy's, too."""
    rows, vocabulary = size
    sequences = [
        RunningSequence(i, [1, 2, 3], Settings(max_new_tokens=99, **settings)) for i in range(rows)
    ]
    sampler, proposed, others = Sampler(), [[7] * drafts] * rows, 0
    watch = _Watch({})
    with watch, torch.inference_mode():
        for _ in range(2):
            # As the model's forward call leaves them, without what made them.
            logits = torch.zeros(rows * (1 + drafts), vocabulary, dtype=dtype)
            logits[:, ::7] = 1
            sampler.choose(sequences, logits, proposed).gains()
    if size == ONE_BY_ONE:
        tracemalloc.start()
        sampler.choose(sequences, logits, proposed).gains()
        others = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return (watch.peak + others) / logits.numel()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_estimate_bounds_the_peak(dtype: torch.dtype, drafts: int) -> None:
    bound = sampled_bytes(str(dtype).removeprefix("torch."))
    found = {name: peak(dtype, drafts, own) for name, own in SETTINGS.items()}
    assert max(found.values()) <= bound, found
    assert found["all"] > 0.6 * bound, found  # and it is no more than that takes
    # A tenth of what was left before, which was two copies in float32.
    assert found["top-p"] > 2 * 4 + logit_size(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_that_draw_one_by_one_take_no_more(dtype: torch.dtype) -> None:
    bound = sampled_bytes(str(dtype).removeprefix("torch."))
    found = {name: peak(dtype, 3, own, ONE_BY_ONE) for name, own in SETTINGS.items()}
    assert max(found.values()) <= bound, found


def logit_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()

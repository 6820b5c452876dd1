"""Models with linear layers: padded batches whose rows end early; prompts in one piece only."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, Family, build, oracle, prompts

import jackfield
from jackfield.errors import PlanError, UsageError

PROMPTS = prompts((2, 5, 12))
COUNTS = (3, 10, 6)
GATED = FAMILIES["llama"].arguments

HYBRIDS = {
    "lfm2": Family("Lfm2Config", {**GATED, "layer_types": ["conv", "full_attention"]}),
    "falcon-h1": Family(
        "FalconH1Config",
        {**GATED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
         "mamba_n_groups": 1, "mamba_chunk_size": 8},
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        {**GATED, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
}  # fmt: skip


@pytest.fixture(params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(FAMILIES, "hybrid", HYBRIDS[request.param])
    return build("hybrid")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_that_end_early_leave_the_others_right(
    hybrid: Any, cache: str, attention: str
) -> None:
    with jackfield.load(
        hybrid, cache_implementation=cache, attn_implementation=attention
    ) as engine:
        found = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in COUNTS])
    expected = [oracle(hybrid, prompt, n) for prompt, n in zip(PROMPTS, COUNTS, strict=True)]
    assert [completion.token_ids for completion in found] == expected


def test_chunks_and_pages_are_refused(hybrid: Any) -> None:
    with pytest.raises(UsageError, match="reads a prompt in one piece"):
        jackfield.load(hybrid, prefill_chunk_size=4)
    with pytest.raises(PlanError, match="does not hold linear_attention layers"):
        jackfield.load(hybrid, cache_implementation="paged")

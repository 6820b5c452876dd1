"""Whatever a plan can refuse is refused before weights are looked for: these folders have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig

import jackfield
from jackfield.errors import CheckpointError, OptionError, PlanError, SelectionError, UsageError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def folder_of(config: PreTrainedConfig, path: Path) -> str:
    config.save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder_of(LlamaConfig(**SIZES), tmp_path / "llama")


@pytest.fixture
def gemma(tmp_path: Path) -> str:
    """With softcap and a sliding window."""
    return folder_of(Gemma2Config(**SIZES), tmp_path / "gemma")


def test_a_plan_needs_no_weights(llama: str) -> None:
    plan = jackfield.plan(llama, attn_implementation="plugin:sdpa", dtype="bfloat16")
    assert plan["attention"].registered.name == "sdpa"
    assert plan.requirements.dtype == "bfloat16"
    assert plan.requirements.head_dims == (8,)
    assert "grouped_query" in plan.requirements.features


def test_only_then_the_weights_are_missed(llama: str) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        jackfield.load(llama)


@pytest.mark.parametrize(
    ("selections", "error", "says"),
    [
        ({"attn_implementation": "spda"}, SelectionError, "did you mean 'sdpa'"),
        ({"attn_implementation": "dynamic"}, SelectionError, "'dynamic' is of kind cache"),
        ({"attn_implementation": 3}, SelectionError, "not 3"),
        ({"attn_implementation": ["sdpa", "nobody"]}, SelectionError, "no attention 'nobody'"),
        ({"cache_implementation": "dynamic?page_size=5"}, OptionError, "no option 'page_size'"),
        ({"decoding": "beem"}, SelectionError, "no decoding 'beem'"),
        ({"dtype": "float61"}, UsageError, "did you mean .*'float16'"),
        ({"device_map": "gpu"}, UsageError, "device_map='gpu'"),
    ],
)
def test_a_selection_is_refused_early(
    llama: str, selections: dict[str, Any], error: type[Exception], says: str
) -> None:
    for decide in (jackfield.plan, jackfield.load):
        with pytest.raises(error, match=says):
            decide(llama, **selections)


def test_a_semantic_is_refused_early(gemma: str) -> None:
    for decide in (jackfield.plan, jackfield.load):
        with pytest.raises(PlanError) as caught:
            decide(gemma, attn_implementation="plugin:sdpa")
        message = str(caught.value)
        assert message.startswith("attn_implementation='plugin:sdpa' cannot run Gemma2ForCausalLM")
        assert "sdpa (does not support softcap (attn_logit_softcapping = 50.0))" in message
        assert "'eager'" in message
    with pytest.raises(CheckpointError, match="no weights"):
        jackfield.load(gemma, attn_implementation=["sdpa", "eager"])


def test_auto_passes_over_what_lacks_the_semantic(gemma: str) -> None:
    plan = jackfield.plan(gemma)
    assert plan["attention"].how == "auto"
    refused = {r.registered.name: r.reasons for r in plan.refusals}
    assert refused["sdpa"] == ("does not support softcap (attn_logit_softcapping = 50.0)",)

"""Numbers in configs that mean nothing: an error by name, or the right text; nothing else."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import build, config_of, oracle, prompts
from transformers import AutoModelForCausalLM

import jackfield
from jackfield.errors import CheckpointError, JackfieldError, PlanError

if TYPE_CHECKING:
    import transformers

ODD = (-1, 0, 1, 3, 10**9, 10**30, "x", True, 2.5)
#: Each has other fields: windows, experts, latent attention, linear layers, older names.
FAMILIES = ("mistral", "gemma2", "gpt2", "qwen3-moe", "deepseek-v3", "llama4", "bloom")


def integers(config: transformers.PreTrainedConfig) -> list[str]:
    return [
        name
        for name, value in config.to_dict().items()
        if type(value) is int or name in ("sliding_window", "head_dim")
    ]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sliding_window", -1, "has sliding_window=-1, which no model"),
        ("sliding_window", 0, "must be from 2 to"),
        ("sliding_window", 1, "must be from 2 to"),
        ("sliding_window", "x", "must be a whole number, not str"),
        ("num_hidden_layers", 10**9, "must be from 1 to 10000"),
        ("num_hidden_layers", True, "must be a whole number, not bool"),
        ("num_attention_heads", 0, "must be from 1 to"),
        ("num_key_value_heads", 3, "must divide num_attention_heads=4"),
        ("vocab_size", -7, "must be from 1 to"),
        ("hidden_size", 2.5, "must be a whole number, not float"),
        ("num_something", 10**6, "it is too large"),
        ("qk_rope_head_dim", 10**9, "it is too large"),
        ("return_dict", False, "must be true"),
    ],
)
def test_what_means_nothing_is_named(field: str, value: Any, says: str, tmp_path: Path) -> None:
    written = {**config_of("mistral").to_dict(), field: value}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError) as caught:
        jackfield.plan(str(tmp_path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_object_is_read_like_a_file() -> None:
    with pytest.raises(CheckpointError, match="the MistralConfig has sliding_window=-1"):
        jackfield.plan(changed("mistral", "sliding_window", -1))


def changed(family: str, field: str, value: Any) -> transformers.PreTrainedConfig:
    config = config_of(family)
    setattr(config, field, value)
    return config


def outcomes(family: str, values: Iterable[Any]) -> dict[str, list[str]]:
    """The fields and values by what became of them; what raises anything else is "raw"."""
    found: dict[str, list[str]] = {"planned": [], "refused": [], "raw": []}
    for field, value in itertools.product(integers(config_of(family)), values):
        try:
            config = changed(family, field, value)
        except Exception:  # noqa: BLE001 - transformers' own setter
            continue
        try:
            jackfield.plan(config)
            outcome = "planned"
        except JackfieldError as refused:
            outcome = "raw" if "\n" in str(refused) else "refused"
        except Exception:  # noqa: BLE001 - what the test is about
            outcome = "raw"
        found[outcome].append(f"{field}={value}")
    return found


def test_odd_numbers_in_any_field_are_planned_or_refused() -> None:
    found = outcomes("mistral", (-1, 10**9))
    assert found["raw"] == []
    assert min(len(found["planned"]), len(found["refused"])) > 1


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_all_odd_numbers_of_all_families(family: str) -> None:
    assert outcomes(family, ODD)["raw"] == []


FLAGS = (
    "add_cross_attention", "is_decoder", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "return_dict", "tie_encoder_decoder", "tie_word_embeddings",
    "torchscript", "use_bfloat16", "use_cache",
)  # fmt: skip


def said_with(folder: Path) -> list[int] | str:
    """Three tokens; "refused", where the plan or the files are."""
    try:
        with jackfield.load(str(folder), dtype="float64") as engine:
            return engine.generate([prompts((6,))[0]], max_new_tokens=3)[0].token_ids
    except (CheckpointError, PlanError):
        return "refused"


def test_scores_of_routers_that_training_asks_for_hinder_nobody() -> None:
    model = build("mixtral")
    expected = oracle(model, prompts((6,))[0], 3)
    model.config.output_router_logits = True
    with jackfield.load(model) as engine:
        assert engine.generate(prompts((6,)), max_new_tokens=3)[0].token_ids == expected


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, "llama", "mixtral"])
def test_any_flag_of_a_config_is_heeded_as_in_transformers_or_refused(
    family: str, tmp_path: Path
) -> None:
    """Also those that a file need not have: none fails in the first step."""
    build(family).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    full = config_of(family).to_dict()
    outcomes = []
    for name in sorted({*FLAGS, *(k for k, v in full.items() if isinstance(v, bool))}):
        file.write_text(json.dumps({**written, name: not full.get(name, False)}))
        found = said_with(tmp_path)
        if found != "refused":
            plain = AutoModelForCausalLM.from_pretrained(
                tmp_path, dtype=torch.float64, attn_implementation="eager",
                experts_implementation="eager",
            ).eval()  # fmt: skip
            assert found == oracle(plain, prompts((6,))[0], 3), name
        outcomes.append(found)
    assert "refused" in outcomes
    assert outcomes.count("refused") < len(outcomes)


@pytest.mark.parametrize("window", [2, 3, 10**6])
def test_a_window_of_any_length_is_right(window: int) -> None:
    model = build("mistral")
    model = type(model)(changed("mistral", "sliding_window", window)).double().eval()
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation("eager")
    texts = prompts((1, 3, 12))
    with jackfield.load(model) as engine:
        found = engine.generate(texts, max_new_tokens=5)
    assert [c.token_ids for c in found] == [oracle(model, text, 5) for text in texts]


@pytest.mark.parametrize("field", ["sub_configs", "use_return_dict", "rope_parameters"])
def test_what_transformers_notes_of_a_field_is_said_once(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not again for each field that is left out in search of the guilty one."""
    written = {**config_of("mistral").to_dict(), field: 5}
    (tmp_path / "config.json").write_text(json.dumps(written))
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(CheckpointError, match=f"without {field}=5"):
            jackfield.plan(str(tmp_path))
    finally:
        logger.removeHandler(caplog.handler)
    assert len({record.getMessage() for record in caplog.records}) <= 1
    assert len(caplog.records) <= 2  # through `logger`, and where it passes records on the root's

"""A live model that its owner changes while an engine runs it: the engine says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompts

import jackfield
from jackfield.errors import CheckpointError, JackfieldError

CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "float": ("cast to float32 while an engine runs it as float64", lambda m: m.float()),
    "half": ("cast to float16", lambda m: m.half()),
    "to": ("cast to bfloat16", lambda m: m.to(torch.bfloat16)),
    "moved": ("moved to meta while an engine runs it on cpu", lambda m: m.to("meta")),
    "window": ("sliding_window 5 -> 2", lambda m: setattr(m.config, "sliding_window", 2)),
    "heads": ("num_attention_heads", lambda m: setattr(m.config, "num_attention_heads", 1)),
    "nested": ("rope_parameters", lambda m: m.config.rope_parameters.update(rope_theta=3.0)),
    "gone": ("rms_norm_eps", lambda m: delattr(m.config, "rms_norm_eps")),
}


def live() -> Any:
    model = build("mistral").double()
    model.config.sliding_window = 5
    return model


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_at_the_next_request(change: str, cache: str) -> None:
    told, act = CHANGES[change]
    model, text = live(), prompts((9,))[0]
    with jackfield.load(model, cache_implementation=cache) as engine:
        engine.generate(text, max_new_tokens=3)
        act(model)
        with pytest.raises(JackfieldError, match=told):
            engine.generate(text, max_new_tokens=3)


def test_a_cast_is_told_in_the_next_step() -> None:
    model, text = live(), prompts((9,))[0]

    def cast(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        model.float()
        return scores

    with (
        jackfield.load(model) as engine,
        pytest.raises(JackfieldError, match="cast to float32 while"),
    ):
        engine.generate(text, max_new_tokens=3, logits_processor=cast)


def test_weights_may_change_in_place_and_what_no_step_reads_too() -> None:
    model, text = live(), prompts((9,))[0]
    with jackfield.load(model) as engine:
        before = engine.generate(text, max_new_tokens=9)[0].token_ids
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        model.config.pad_token_id, model.config.use_cache = 0, False
        after = engine.generate(text, max_new_tokens=9)[0].token_ids
        model.config.use_cache = True
    assert after == alone(model, text) != before
    model.config.sliding_window = 3
    with jackfield.load(model) as engine:
        assert engine.generate(text, max_new_tokens=9)[0].token_ids == alone(model, text)


def alone(model: Any, text: list[int]) -> list[int]:
    """What an engine says of it that has never seen another."""
    with jackfield.load(copy.deepcopy(model)) as engine:
        return list(engine.generate(text, max_new_tokens=9)[0].token_ids)


def test_a_window_of_one_is_refused_in_a_live_model_as_in_a_file() -> None:
    model = live()
    model.config.sliding_window = 1
    with pytest.raises(CheckpointError, match="sliding_window=1, which no model can have"):
        jackfield.load(model)


def test_saving_the_model_of_an_engine_is_no_change_of_it(tmp_path: Path) -> None:
    with jackfield.load(build("llama", torch.float32)) as engine:
        expected = engine.generate([5, 6, 7], max_new_tokens=3)[0].token_ids
        engine.model.save_pretrained(tmp_path)  # writes the dtype into the config
        assert engine.generate([5, 6, 7], max_new_tokens=3)[0].token_ids == expected

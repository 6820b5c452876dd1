"""Models whose attention is part of their code: what runs there is what the model means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import build, prompts
from transformers.models.falcon.modeling_falcon import FalconAttention

import jackfield

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = prompts((5, 11))
NEW = 6


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Falcon under the name 'eager', with a bias that its mask alone adds."""
    inner = FalconAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["alibi"] = torch.zeros_like(kwargs["alibi"])
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(FalconAttention, "forward", forward)
    return eager()


def eager() -> PreTrainedModel:
    model = build("falcon-alibi")
    model.config._attn_implementation = "eager"  # which Falcon cannot be asked for once it is made
    return model


@torch.inference_mode()
def logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.fixture
def installed() -> Iterator[None]:
    jackfield.install()
    yield
    jackfield.uninstall()


def test_falcon_adds_its_bias_once(once: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [logits(once, prompt) for prompt in PROMPTS]
    monkeypatch.undo()
    own = eager()
    assert (logits(own, PROMPTS[1]) - expected[1]).abs().max() > 1e-3, "transformers mended it"
    with jackfield.load(own, attn_implementation="eager") as engine:
        found = engine.generate(PROMPTS, max_new_tokens=1, output_logits=True)
    for one, due in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits[0].double(), due[-1], rtol=0, atol=1e-6)
    assert own.config._attn_implementation == "eager"  # given back as it was


@pytest.mark.parametrize("way", ["loaded", "given"])
def test_falcon_in_plain_transformers(
    once: PreTrainedModel, installed: None, way: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(once, PROMPTS[1])
    monkeypatch.undo()
    if way == "loaded":
        once.save_pretrained(tmp_path)
        model = type(once).from_pretrained(
            tmp_path, attn_implementation="plugin:eager", dtype=torch.float64
        )
    else:
        model = build("falcon-alibi")
        model.set_attn_implementation("plugin:eager")
    torch.testing.assert_close(logits(model, PROMPTS[1]), expected, rtol=0, atol=1e-6)

"""The composition table has no third outcome, and would show one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import composition
import pytest

from jackfield.contracts import BoundAttention
from jackfield.discovery import registry
from jackfield.registry import Registered
from jackfield_plugins.attention.sdpa import SdpaAttention, torch_attention

if TYPE_CHECKING:
    import torch


class LyingAttention(SdpaAttention):
    """Declares windows and prefixes that are read in both directions, and knows neither."""

    name = "lying"
    auto_rank = None

    def bind(self, context: Any) -> BoundAttention:
        honest = torch_attention()

        def mask(**kwargs: Any) -> Any:
            from transformers.masking_utils import causal_mask_function, sdpa_mask

            return sdpa_mask(**{**kwargs, "mask_function": causal_mask_function})

        def packed(module: Any, query: torch.Tensor, layer: Any, **kwargs: Any) -> torch.Tensor:
            window, layer.tables.window = layer.tables.window, None
            try:
                return honest.packed(module, query, layer, **kwargs)
            finally:
                layer.tables.window = window

        return BoundAttention(honest.forward, mask, packed)


@pytest.fixture
def lying() -> Iterator[str]:
    attentions = registry().backends["attention"]
    attentions.append(Registered(LyingAttention(), "outside", "1.0", "lying"))
    yield "lying"
    attentions.pop()


def test_a_lying_attention_is_caught(lying: str) -> None:
    assert composition.run("mistral", "sdpa", "dynamic").outcome == "equal"
    caught = composition.run("mistral", lying, "dynamic")
    assert (caught.outcome, "single" in caught.note) == ("wrong", True)
    assert composition.run("llama", lying, "dynamic").outcome == "equal"


def test_an_attention_that_ignores_a_prefix_is_caught(lying: str) -> None:
    for honest in ("eager", "sdpa", "cpu_decode", "flex_attention"):
        assert composition.run("hrm-text", honest, "dynamic").outcome == "equal"
    assert composition.run("hrm-text", lying, "dynamic").outcome == "wrong"


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt-oss", "hrm-text", "gemma3n", "diffllama"]
)
def test_no_third_outcome(family: str) -> None:
    assert [c for c in composition.cells([family]) if c.outcome == "wrong"] == []


@pytest.mark.long
def test_the_page_is_what_the_run_gives() -> None:
    assert composition.PAGE.read_text() == composition.page(composition.cells())

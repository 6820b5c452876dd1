"""Quantized models through every decoding strategy and the paged cache, among one another."""

from __future__ import annotations

from typing import Any

import extras
import pytest

import jackfield

TEXTS = (
    "Sort these numbers: 41 7 88 23",
    "Copy: red green blue",
    "Reverse: abc",
    'Extract as JSON: "Ann is 31."',
)
PROMPTS = [[{"role": "user", "content": text}] for text in TEXTS]
LIBRARIES = {"bnb": "bitsandbytes", "torchao": "torchao"}


def selection(text: str) -> Any:
    """A parameter that is skipped where its library is missing."""
    name = next((v for k, v in LIBRARIES.items() if text.startswith(k)), None)
    return pytest.param(text, marks=extras.marked(*filter(None, [name])))


@pytest.mark.parametrize(
    "quantization",
    [
        selection("int4-cpu"),
        selection("int4-cpu?head=8"),
        selection("bnb-4bit"),
        selection("bnb-4bit?type=fp4"),
        selection("bnb-8bit?threshold=0"),
        selection("torchao"),
    ],
)
@pytest.mark.one_in(4)
def test_strategies_batches_and_structures_change_nothing(quantization: str) -> None:
    strategies = {"sample": "sample", "lookup": "prompt_lookup", "assisted": "assisted"}
    with jackfield.load(
        "demo",
        quantization=quantization,
        decoding=strategies,
        assistant_model="demo-draft",
        max_batch_size=8,
    ) as engine:
        assert engine.plan["cache"].registered.name == "paged"
        alone = [engine.generate(p, max_new_tokens=24)[0].token_ids for p in PROMPTS]
        settings = [{"decoding": name} for name in strategies for _ in PROMPTS]
        found = engine.generate(PROMPTS * 3, settings=settings, max_new_tokens=24)
        assert [c.token_ids for c in found] == alone * 3
        assert engine.generate(PROMPTS[0], max_new_tokens=24)[0].text == "7 23 41 88"
        (chosen,) = engine.generate(PROMPTS[1], choices=["red", "blue"], decoding="assisted")
        assert chosen.text in ("red", "blue")
        assert engine.report()["quantizer"].source in (
            "56 of 57 linear layers",
            "57 of 57 linear layers",
        )

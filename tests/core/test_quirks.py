"""The table of quirks is true of the installed transformers, and of nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedModel

from jackfield.bridge import quirks
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.quirks import TABLE, Quirk

NAMES = {id(value): name for name, value in vars(quirks).items() if isinstance(value, Quirk)}
CASES = [pytest.param(quirk, kind, id=f"{NAMES[id(quirk)]}-{kind}")
         for quirk in TABLE for kind in quirk.models]  # fmt: skip


def small(kind: str, **config: Any) -> PreTrainedModel:
    """Two layers of a model as its family makes it, on the meta device."""
    made = CONFIG_MAPPING[kind](**config)
    part = made.get_text_config(decoder=True)
    count = getattr(part, "num_hidden_layers", 0)
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(part, name, value[:2])
    if count:
        part.num_hidden_layers = 2
    return meta_model(made)


@pytest.mark.parametrize(("quirk", "kind"), CASES)
def test_a_family_does_what_the_table_says(quirk: Quirk, kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    assert quirk.holds(small(kind, **dict(quirk.config)))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma2", "roformer", "gpt2", "opt"])
def test_plain_families_do_nothing_of_it(kind: str) -> None:
    model = small(kind, is_decoder=True) if kind == "roformer" else small(kind)
    assert [NAMES[id(quirk)] for quirk in TABLE if quirk.holds(model)] == []


def test_the_table_is_whole() -> None:
    assert set(map(id, TABLE)) == NAMES.keys()
    assert all(quirk.so and quirk.hence and quirk.models for quirk in TABLE)

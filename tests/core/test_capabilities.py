"""Capabilities: nonsense is refused when they are made; every requirement is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jackfield.contracts import (
    AttentionCapabilities,
    BoundAttention,
    CacheCapabilities,
    Decoding,
    DecodingCapabilities,
    Requirements,
)
from jackfield.contracts.decoding import BEAM_SETTINGS, DRAFT_SETTINGS
from jackfield.contracts.settings import BeamSettings, DraftSettings

NEEDS = Requirements(
    architecture="TinyForCausalLM",
    dtype="float32",
    device="cpu",
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dims=(16,),
    layer_types=("full_attention", "full_attention"),
    windows=(None, None),
)
MIXED = frozenset({"full_attention", "sliding_attention"})
WHY = "(rollback), which the decoding strategy needs"
SOFTCAP = replace(NEEDS, features={"softcap": "attn_logit_softcapping = 50.0"})


class Guess(Decoding):
    name = "guess"

    def bind(self, context: Any) -> Any: ...


@pytest.mark.parametrize(
    ("declared", "untrue"),
    [
        ({"num_beams"}, "num_beams"),
        ({"num_assistant_tokens", "seed"}, "num_assistant_tokens"),
        ({"token_healing"}, "token_healing"),
        ({"temperature", "seed"}, None),
    ],
)
def test_a_strategy_declares_only_settings_that_reach_it(
    monkeypatch: pytest.MonkeyPatch, declared: set[str], untrue: str | None
) -> None:
    own = DecodingCapabilities(settings=frozenset(declared))
    monkeypatch.setattr(Guess, "capabilities", own, raising=False)
    found = Guess().flaws()
    assert [untrue in flaw for flaw in found] == ([] if untrue is None else [True])


def test_what_a_strategy_can_be_asked_for_is_what_its_settings_have() -> None:
    assert set(DraftSettings._fields) == DRAFT_SETTINGS
    assert set(BeamSettings._fields) == BEAM_SETTINGS


def declares(**members: Any) -> AttentionCapabilities:
    return AttentionCapabilities(**members)


def holds(**members: Any) -> CacheCapabilities:
    common = {"layout": "padded", "layer_types": frozenset({"full_attention"})}
    return CacheCapabilities(**{**common, **members})


@pytest.mark.parametrize(
    ("capabilities", "needs", "reasons"),
    [
        (declares(), NEEDS, []),
        (declares(features=frozenset({"softcap"}), head_dims=frozenset({16})), SOFTCAP, []),
        (declares(devices=frozenset({"cuda"})), replace(NEEDS, device=None), []),
        (declares(dtypes=frozenset({"float16"})), NEEDS,
         ["does not run with dtype float32 (only float16)"]),
        (declares(devices=frozenset({"xpu", "cuda"})), NEEDS,
         ["does not run with device cpu (only cuda, xpu)"]),
        (declares(layouts=frozenset({"packed"})), NEEDS,
         ["does not run with layout padded (only packed)"]),
        (declares(layouts=frozenset({"packed"})), replace(NEEDS, layout="packed"), []),
        (declares(head_dims=frozenset({128, 64})), NEEDS,
         ["has no kernel for head size 16 (only 64, 128)"]),
        (declares(head_dims=frozenset({16})), replace(NEEDS, head_dims=(16, 24, 32)),
         ["has no kernel for head size 24, 32 (only 16)"]),
        (declares(features=frozenset({"sinks"})), SOFTCAP,
         ["does not support softcap (attn_logit_softcapping = 50.0)"]),
        (declares(dtypes=frozenset({"float16"}), devices=frozenset({"cuda"})), SOFTCAP,
         ["does not support softcap (attn_logit_softcapping = 50.0)",
          "does not run with dtype float32 (only float16)",
          "does not run with device cpu (only cuda)"]),
        (holds(), NEEDS, []),
        (holds(dtypes=frozenset({"float16"})), NEEDS, ["does not hold dtype float32"]),
        (holds(), replace(NEEDS, layer_types=("full_attention", "sliding_attention")),
         ["does not hold sliding_attention layers"]),
        (holds(), replace(NEEDS, rollback=True),
         ["cannot take back tokens (rollback), which the decoding strategy needs"]),
        (holds(rollback=frozenset({"full_attention"})), replace(NEEDS, rollback=True), []),
        (holds(layer_types=MIXED, rollback=frozenset({"full_attention"})),
         replace(NEEDS, rollback=True, layer_types=tuple(MIXED)),
         [f"cannot take back tokens of sliding_attention layers {WHY}"]),
    ],
)  # fmt: skip
def test_every_requirement_is_compared(
    capabilities: AttentionCapabilities | CacheCapabilities,
    needs: Requirements,
    reasons: list[str],
) -> None:
    assert capabilities.lacks(needs) == reasons


@pytest.mark.parametrize(
    ("make", "members", "says"),
    [
        (declares, {"layouts": frozenset({"round"})}, "unknown layout round; known:"),
        (declares, {"dtypes": frozenset({"fp16"})}, "unknown dtype fp16"),
        (declares, {"devices": frozenset({"gpu"})}, "unknown device gpu"),
        (declares, {"features": frozenset({"b", "a"})}, "unknown feature a, b"),
        (declares, {"features": "softcap"}, "features must be a frozenset .*'softcap'"),
        (declares, {"features": ["softcap"]}, "features must be a frozenset"),
        (declares, {"dtypes": frozenset()}, "at least one layout, one dtype and one"),
        (declares, {"head_dims": frozenset({0})}, "head_dims must be .*positive"),
        (declares, {"head_dims": frozenset({"64"})}, "head_dims must be"),
        (declares, {"head_dims": frozenset()}, "head_dims must be"),
        (declares, {"head_dims": [64]}, "head_dims must be"),
        (holds, {"layout": "round"}, "unknown layout round"),
        (holds, {"layer_types": frozenset({"windowed"})}, "unknown layer type windowed"),
        (holds, {"layer_types": frozenset()}, "at least one layer type"),
        (holds, {"layer_types": ["full_attention"]}, "layer types must be a frozenset"),
        (holds, {"dtypes": frozenset({"int8"})}, "unknown dtype int8"),
        (holds, {"layout": "padded", "recordable": True}, "recordable is for the packed layout"),
        (DecodingCapabilities, {"settings": "temperature"}, "settings must be a frozenset"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(make: Callable[..., Any], members: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(**members)


@pytest.mark.parametrize("part", ["forward", "mask"])
@pytest.mark.parametrize("value", [None, "sdpa"])
def test_an_attention_without_its_mask_does_not_load(part: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"without a {part} function does not load"):
        BoundAttention(**{"forward": print, "mask": print, part: value})

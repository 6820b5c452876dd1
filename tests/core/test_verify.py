"""`verify`: the first steps are compared with the model computed again, and blamed rightly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, MORE_FAMILIES, build, prompts
from wrong_attentions import Late, after, attention, first_logits
from wrong_caches import updating

import jackfield
from jackfield.contracts import (
    Backend,
    BoundAttention,
    FusedLayer,
    Kernel,
    KernelCapabilities,
)
from jackfield.errors import JackfieldError, PlanError, PluginError, UsageError

PROMPTS = prompts((5, 14, 23))
#: grouped heads; windows and a softcap; experts and heads of two sizes
FEW = ("llama", "gemma2", "deepseek-v3")
Plugs = Callable[[Backend], str]


def said(model: Any, verify: Any = True, **arguments: Any) -> str:
    with (
        jackfield.load(model, verify=verify, **arguments) as engine,
        pytest.raises(PluginError) as caught,
    ):
        engine.generate(PROMPTS, max_new_tokens=6)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"cache_implementation": "paged"},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic", "decoding": "prompt_lookup"},
        {"cache_implementation": "paged", "prefill_chunk_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.long)
        for name in [*FAMILIES, *MORE_FAMILIES]
    ],
)
@pytest.mark.one_in(4)
def test_what_is_right_is_verified(name: str, arguments: dict[str, Any], dtype: Any) -> None:
    try:
        engine = jackfield.load(build(name, dtype), verify=6, **arguments)
    except UsageError as refusal:
        pytest.skip(str(refusal))
    with engine:
        engine.generate(PROMPTS, max_new_tokens=6)
        verified, steps = engine.report().verified, engine._loop.steps
    assert verified is not None
    assert verified.steps == min(6, steps)
    assert verified.sequences >= verified.steps
    assert not verified.rounded


def changed(change: Callable[..., Any]) -> Callable[[], Backend]:
    """sdpa, of which `change(output, query, key, ...)` is returned in both layouts."""
    return lambda: attention(
        lambda bound: replace(
            bound,
            forward=lambda m, *args, **kwargs: (change(bound.forward(m, *args, **kwargs)[0]), None),
            packed=lambda m, *args, **kwargs: change(_packed(bound)(m, *args, **kwargs)[None])[0],
        )
    )


def _packed(bound: BoundAttention) -> Any:
    return bound.packed


def handed(change: Callable[[dict[str, Any]], None]) -> Callable[[], Backend]:
    """sdpa, which is handed other keyword arguments."""

    def made(bound: BoundAttention) -> BoundAttention:
        def wrong(inner: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                change(kwargs)
                return inner(*args, **kwargs)

            return forward

        return replace(bound, forward=wrong(bound.forward), packed=wrong(bound.packed))

    return lambda: attention(made)


ATTENTIONS = {
    "no scaling": handed(lambda kwargs: kwargs.update(scaling=1.0)),
    "heads in another order": changed(lambda output: output.roll(1, dims=2)),
    "a little off": changed(lambda output: output * 1.01),
    "not a number": changed(lambda output: output.index_fill(1, torch.tensor([0]), torch.nan)),
}


@pytest.mark.parametrize("cache", ["dynamic", "paged"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_wrong_attention_is_named(plug: Plugs, name: str, cache: str) -> None:
    arguments = {"attn_implementation": plug(ATTENTIONS[name]()), "cache_implementation": cache}
    told = said(build("llama", torch.float32), **arguments)
    assert "attention 'wrong' of stranger 1.2: verify: outputs of the attention of layer" in told
    assert "at position" in told
    if name not in ("wrong later", "not a number"):  # which may fall on padding first
        assert "of layer 0" in told


def wrong_later() -> Backend:
    """Right in the first two steps of two layers, and in one layer of the third."""
    return changed(Late(lambda output: output + 0.5, after=5))()


ATTENTIONS["wrong later"] = wrong_later

CACHES = {
    "rows in another order": lambda new, keys, values: (keys.roll(1, 0), values),
    "values of the token before": lambda new, keys, values: (keys, values.roll(1, 2)),
    "keys and values exchanged": lambda new, keys, values: (values, keys),
    "keys of the step changed": lambda new, keys, values: (
        torch.cat([keys[:, :, :-1], 2 * keys[:, :, -1:]], 2),
        values,
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_wrong_cache_is_named(plug: Plugs, name: str) -> None:
    told = said(build("llama", torch.float32), cache_implementation=plug(updating(CACHES[name])))
    assert "cache 'wrong' of stranger 1.2: verify: layer 0 reads the " in told


def test_a_cache_that_rounds_is_told(plug: Plugs) -> None:
    """As it may; then nothing behind it can be compared."""
    rounding = plug(updating(lambda new, keys, values: (keys * 1.05, values)))
    with jackfield.load(build("llama"), verify=2, cache_implementation=rounding) as engine:
        engine.generate(PROMPTS, max_new_tokens=4)
        found = engine.report()
    assert found.verified is not None
    assert 0.05 < found.verified.rounded < 0.25  # of the second layer more, behind the first
    assert "the cache rounds by " in str(found)
    assert found.to_dict()["verified"]["steps"] == 2


@pytest.mark.parametrize(
    "wrong",
    [lambda compiled, *args: compiled(*args) * 1.05, lambda compiled, *args: compiled(*args) + 1],
)
def test_a_wrong_compiler_is_named(plug: Plugs, wrong: Any) -> None:
    arguments = {"attn_implementation": "sdpa", "cache_implementation": "paged"}
    told = said(build("llama", torch.float32), compile=plug(after(wrong)), **arguments)
    assert "compiler 'wrong' of stranger 1.2: verify: logits" in told


def test_a_compiler_that_gives_the_first_logits_is_named(plug: Plugs) -> None:
    model, wrong = build("llama", torch.float32), plug(first_logits())
    with (
        jackfield.load(model, verify=True, compile=wrong, cache_implementation="paged") as engine,
        pytest.raises(JackfieldError, match="compiler 'wrong' of stranger"),
    ):
        engine.generate(PROMPTS[:1], max_new_tokens=6)


def test_a_kernel_that_is_right_on_few_rows_is_named(plug: Plugs) -> None:
    """Right on as many as its proof at load tries, wrong on the prompts, which are more."""
    told = said(build("llama", torch.float32), kernels=plug(right_on_few_rows()))
    assert "kernel 'wrong' of stranger 1.2: verify: queries of layer" in told


def right_on_few_rows() -> Kernel:
    class Wrong(Kernel):
        name = "wrong"
        capabilities = KernelCapabilities(devices=frozenset({"cpu"}))

        def fits(self, module: torch.nn.Module, options: Any) -> bool:
            return type(module).__name__ == "LlamaRMSNorm"

        def bind(self, context: Any) -> FusedLayer:
            def make(module: Any) -> Any:
                own = type(module).forward
                return lambda x: own(module, x) * (1.5 if x[..., 0].numel() > 33 else 1)

            return FusedLayer(make)

    return Wrong()


def test_nothing_is_compared_after_the_steps_that_were_asked_for(plug: Plugs) -> None:
    late = plug(ATTENTIONS["wrong later"]())
    with jackfield.load(build("llama"), verify=2, attn_implementation=late) as engine:
        engine.generate(PROMPTS, max_new_tokens=6)
        assert engine._bound.attention.tap is None
        assert engine._loop.verifying is None
        assert engine.report().verified is not None


def test_an_engine_verifies_nothing_by_itself() -> None:
    with jackfield.load(build("llama")) as engine:
        assert engine.report().verified is None


@pytest.mark.parametrize("verify", ["yes", -1, 1.5, None])
def test_what_is_no_number_of_steps_is_refused(verify: Any) -> None:
    if verify is None:  # the same as leaving it out
        jackfield.load("demo", verify=None).close()
        return
    with pytest.raises(UsageError, match="verify must be True, False or a number of steps"):
        jackfield.load("demo", verify=verify)


def test_a_prefix_model_is_refused_before_its_weights() -> None:
    with pytest.raises(PlanError, match=r"verify: HrmText.* drop verify"):
        jackfield.load(build("hrm-text"), verify=True)

"""Rotations of queries and keys: the kernel in Triton, whom it fits, and what takes its place."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from families import build
from torch import nn

from jackfield.bridge.layers import bind_layers
from jackfield.bridge.rotary import prove_rotations
from jackfield.contracts import (
    BindContext,
    FusedLayer,
    FusedRotary,
    Kernel,
    KernelCapabilities,
    rotary_of,
)
from jackfield.errors import ExecutionError, PlanError, PluginError
from jackfield.registry.backends import Choice, Registered
from jackfield.spelling import AUTO
from jackfield.testing.checks import verdict as judged

pytest.importorskip("triton", reason="needs jackfield[triton]")

from jackfield_plugins.kernel.triton_rotary.halves import turned, turns_halves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="Triton runs on a GPU or, with TRITON_INTERPRET=1, in Python",
)


def attention_of(family: str) -> Any:
    model = build(family, torch.float32)
    return next(module for module in model.modules() if rotary_of(module) is not None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"])
def test_whose_halves_are_turned(family: str) -> None:
    assert turns_halves(rotary_of(attention_of(family)))


@pytest.mark.parametrize("family", ["cohere", "glm", "ernie4_5", "gpt_oss"])
def test_whose_are_not(family: str) -> None:
    """Neighbours are turned, a part of a head alone, or by angles of half its size."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert not turns_halves(module.apply_rotary_pos_emb)


def test_what_is_no_rotation_of_pairs() -> None:
    assert turns_halves(lambda q, k, cos, sin: [turned(one, cos, sin) for one in (q, k)])
    for odd in (lambda q, k: (q, k), lambda *_: None, lambda q, k, cos, sin: (q, k)):
        assert not turns_halves(odd)


def test_layers_without_it() -> None:
    model = build("gpt2")
    assert all(rotary_of(module) is None for module in model.modules())


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 48, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (1, 1), (17, 1)])
@pytest.mark.one_in(4)
def test_numbers(dtype: torch.dtype, size: int, heads: int, kv_heads: int) -> None:
    from jackfield_plugins.kernel.triton_rotary.launch import fits, rotated

    draw = torch.Generator().manual_seed(size * heads)
    for texts, tokens in ((1, 1), (1, 3), (2, 4)):
        wide = torch.randn(texts, tokens, heads + kv_heads, size, generator=draw)
        q, k = wide.to(DEVICE, dtype).transpose(1, 2).split([heads, kv_heads], 1)
        angles = torch.randn(2, texts, tokens, size, generator=draw).to(DEVICE, dtype)
        cos, sin = angles
        assert fits(q, k, cos, sin)
        found = rotated(q, k, cos, sin)
        own = rotary_of(attention_of("llama"))(q, k, cos, sin)  # type: ignore[misc]
        for new, due in zip(found, own, strict=True):
            assert (new.shape, new.dtype) == (due.shape, dtype)
            assert new.transpose(1, 2).is_contiguous()
            # A GPU rounds as torch does; the interpreter cuts bfloat16 off.
            exact = DEVICE == "cuda" and dtype != torch.float32
            near = 3 * torch.finfo(dtype).eps * float(due.abs().max())
            assert torch.allclose(new, due, rtol=0, atol=0 if exact else near)


@interpreted
@pytest.mark.parametrize(("size", "part"), [(32, 16), (64, 16), (64, 48), (80, 32)])
def test_a_part_of_a_head(size: int, part: int) -> None:
    """GPT-NeoX and GLM-4.5 turn the first numbers of a head; texts may share the angles of one."""
    from jackfield_plugins.kernel.triton_rotary.launch import fits, rotated

    draw, own = torch.Generator().manual_seed(size), rotary_of(attention_of("gpt-neox"))
    for texts, shared, tokens in ((1, 1, 1), (1, 1, 3), (2, 2, 4), (3, 1, 2)):
        q, k = (
            torch.randn(texts, tokens, n, size, generator=draw).to(DEVICE).transpose(1, 2)
            for n in (9, 3)
        )
        cos, sin = torch.randn(2, shared, tokens, part, generator=draw).to(DEVICE)
        assert fits(q, k, cos, sin)
        for new, due in zip(rotated(q, k, cos, sin), own(q, k, cos, sin), strict=True):  # type: ignore[misc]
            assert torch.allclose(new, due, atol=1e-6)


@pytest.mark.long
@interpreted
def test_it_runs_in_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's heads lie as the kernel reads them."""
    from jackfield.testing.kernel.rotary import checks
    from jackfield.testing.subject import uninstalled
    from jackfield_plugins.kernel.triton_rotary import TritonRotary, launch

    ran: list[object] = []
    whole = launch.rotated
    monkeypatch.setattr(launch, "rotated", lambda *given: ran.append(1) or whole(*given))
    with uninstalled(TritonRotary()) as subject:
        for check in checks(subject, {"LlamaAttention": "plain", "Phi3Attention": "Phi3Config"}):
            kind = check.name.split(".")[1]
            if check.large or check.name.startswith("Phi3") != (kind == "part"):
                continue
            ran.clear()
            verdict = judged(check)
            assert verdict.outcome == "passed", verdict
            assert ran or kind == "more", check.name


@interpreted
def test_what_does_not_lie_so_is_the_layers_own() -> None:
    from jackfield_plugins.kernel.triton_rotary.launch import fits, rotary

    module = attention_of("llama")
    turn, own = rotary(module), rotary_of(module)
    q, k = torch.randn(1, 4, 3, 32, device=DEVICE), torch.randn(1, 2, 3, 32, device=DEVICE)
    cos, sin = torch.randn(2, 1, 3, 32, device=DEVICE)
    others: tuple[tuple[Any, ...], ...] = (
        (q[..., 1:-1], k[..., 1:-1], cos[..., 1:-1], sin[..., 1:-1]),  # not aligned
        (q, k, cos.double(), sin.double()),
        (q.transpose(1, 2), k.transpose(1, 2)[:, :, :2], cos, sin, 2),
        (q, k[:, :0], cos, sin),
        (q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]),
    )
    for given in others:
        for new, due in zip(turn(*given), own(*given), strict=True):  # type: ignore[misc]
            assert (new.shape, new.dtype) == (due.shape, due.dtype)
            assert torch.allclose(new, due, atol=1e-6)
    assert fits(q, k, cos, sin)
    assert not fits(*others[0])


def test_layers_that_call_another_function() -> None:
    from jackfield_plugins.kernel.triton_rotary import TritonRotary

    for interleaved in (False, True):
        model = build("deepseek-v3", torch.float32)
        model.config.rope_interleave = interleaved
        found = [m for m in model.modules() if TritonRotary().fits(m, None)]
        assert bool(found) is not interleaved


class Mine(Kernel):
    """Rotations of every layer that has one, by `make`."""

    name = "mine"
    capabilities = KernelCapabilities(devices=frozenset({"cpu"}))

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        self.make = make

    def fits(self, module: nn.Module, options: Any) -> bool:
        return rotary_of(module) is not None

    def bind(self, context: BindContext) -> FusedRotary:
        return FusedRotary(self.make)


def prove_rotation(registered: Registered, module: nn.Module, rotation: Any, *how: Any) -> None:
    prove_rotations(registered, [(module, rotation)], *how)


def registered(make: Callable[[nn.Module], Any]) -> Registered:
    return Registered(Mine(make), "stranger", "1.0", "ep")


PLAIN = torch.float32, torch.device("cpu")


def in_float32(_: Choice) -> Any:
    """What is read of a context."""
    needs = SimpleNamespace(dtype="float32")
    return SimpleNamespace(requirements=needs, device=PLAIN[1], options=None)


def right(module: nn.Module) -> Any:
    return rotary_of(module)


WRONG: dict[str, Callable[[Any], Any]] = {
    "angles exchanged": lambda own: lambda q, k, cos, sin, *a, **kw: own(q, k, sin, cos),
    "turned back": lambda own: lambda q, k, cos, sin, *a, **kw: own(q, k, cos, -sin),
    "keys as they were": lambda own: lambda q, k, cos, sin, *a, **kw: (own(q, k, cos, sin)[0], k),
    "first token's angle": lambda own: lambda q, k, cos, sin, *a, **kw: own(
        q, k, cos[:, :1].expand_as(cos), sin[:, :1].expand_as(sin)
    ),
    "first text's angle": lambda own: lambda q, k, cos, sin, *a, **kw: own(
        q, k, cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    ),
    "one head": lambda own: lambda q, k, cos, sin, *a, **kw: (
        torch.cat([own(q, k, cos, sin)[0][:, :1], q[:, 1:]], 1), own(q, k, cos, sin)[1],
    ),
    "in halves of bits": lambda own: lambda q, k, cos, sin, *a, **kw: tuple(
        one.bfloat16().to(q.dtype) for one in own(q, k, cos, sin)
    ),
    "another dtype": lambda own: lambda q, k, cos, sin, *a, **kw: tuple(
        one.double() for one in own(q, k, cos, sin)
    ),
    "tokens before heads": lambda own: lambda q, k, cos, sin, *a, **kw: tuple(
        one.transpose(1, 2) for one in own(q, k, cos, sin)
    ),
    "not finite": lambda own: lambda q, k, cos, sin, *a, **kw: tuple(
        one / 0 for one in own(q, k, cos, sin)
    ),
    "angles of one text": lambda own: lambda q, k, cos, sin, *a, **kw: own(
        q, k, *(a if len(a) == len(q) else torch.cat([a, 0 * a]) for a in (cos, sin))
    ),
    "in place": lambda own: lambda q, k, cos, sin, *a, **kw: (
        q.copy_(own(q, k, cos, sin)[0]), own(q, k, cos, sin)[1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_what_is_no_such_rotation_is_refused(how: str) -> None:
    module = attention_of("llama")
    prove_rotation(registered(right), module, right(module), *PLAIN)
    with pytest.raises(ExecutionError, match="LlamaAttention"):
        prove_rotation(registered(right), module, WRONG[how](rotary_of(module)), *PLAIN)


def test_what_returns_something_else_is_a_fault_of_the_plugin() -> None:
    module = attention_of("llama")
    for odd in (None, 3, (torch.ones(1),), [torch.ones(1)] * 3):
        with pytest.raises(PluginError, match="must return two tensors"):
            prove_rotation(registered(right), module, lambda *_, odd=odd: odd, *PLAIN)


def test_what_turns_no_queries_and_keys_is_refused() -> None:
    """As the functions of Gemma 3n, GPT-J and of models that somebody else wrote."""
    module = attention_of("llama")
    for own in (lambda x, cos, sin: x, lambda q, k, cos, sin: (q, k, None), lambda *_: {}["no"]):
        odd = type("Odd", (nn.Module,), {"forward": calling(own)})()
        odd.config = module.config
        with pytest.raises(ExecutionError, match=r"fits Odd.*its `fits` has to refuse it"):
            prove_rotation(registered(right), odd, own, *PLAIN)


def calling(own: Callable[..., Any]) -> Any:
    """A forward in a module that has `own` under that name."""

    def forward(self: Any) -> Any:
        return apply_rotary_pos_emb()  # type: ignore[name-defined] # noqa: F821

    return FunctionType(forward.__code__, {"apply_rotary_pos_emb": own})


def test_a_method_of_that_name_is_none() -> None:
    def forward(self: Any) -> Any:
        return self.apply_rotary_pos_emb()

    made = FunctionType(forward.__code__, {"apply_rotary_pos_emb": right})
    assert rotary_of(type("Odd", (nn.Module,), {"forward": made})()) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_layers_whose_weights_are_stored_as_whole_numbers(dtype: torch.dtype) -> None:
    module = attention_of("llama")
    for name, linear in list(module.named_children()):
        stored = nn.Module()
        stored.register_buffer("weight", linear.weight.to(dtype))
        setattr(module, name, stored)
    prove_rotation(registered(right), module, right(module), torch.bfloat16, PLAIN[1])


def test_it_is_called_in_its_layers_and_taken_out_again() -> None:
    model, ids = build("llama"), torch.tensor([[5, 6, 7, 8]])
    due, calls = model(ids).logits, []

    def make(module: nn.Module) -> Any:
        own: Any = rotary_of(module)

        def turn(*given: Any) -> Any:
            calls.append(module)
            return own(*given)

        return turn

    choice = Choice(registered(make), None, AUTO)
    (layers,) = bind_layers([choice], model, in_float32)
    count = model.config.num_hidden_layers
    assert layers.source == f"{count} LlamaAttention"
    restore = layers.install()
    calls.clear()
    other = build("llama")
    assert torch.equal(model(ids).logits, due)
    assert (len(calls), layers.calls) == (count, count)
    other(ids)  # of another model, whose layers rotate as before
    assert layers.calls == count
    restore()
    assert torch.equal(model(ids).logits, due)
    assert (len(calls), layers.calls) == (count, count)


def test_every_layer_is_proven() -> None:
    """The second of two that are alike turns back."""
    model = build("llama")
    layers = [module for module in model.modules() if rotary_of(module) is not None]
    pairs = [(module, right(module)) for module in layers]
    prove_rotations(registered(right), pairs, *PLAIN)
    pairs[-1] = layers[-1], WRONG["turned back"](rotary_of(layers[-1]))
    with pytest.raises(ExecutionError, match="does not rotate as LlamaAttention does"):
        prove_rotations(registered(right), pairs, *PLAIN)


def test_what_is_counted_is_the_rotation() -> None:
    """DeepSeek's layers have two functions, and their config says in each step which they call."""
    model, choice = build("deepseek-v3", torch.float32), Choice(registered(right), None, AUTO)
    model.config.rope_interleave = True
    with pytest.raises(PlanError, match="finds no layer"):
        bind_layers([choice], model, in_float32)
    model.config.rope_interleave = False
    (layers,) = bind_layers([choice], model, in_float32)
    layers.install()
    model(torch.tensor([[5, 6, 7]]))
    assert layers.calls == layers.replaced
    model.config.rope_interleave = True
    model(torch.tensor([[5, 6, 7]]))
    assert layers.calls == layers.replaced


def test_angles_that_are_wider_than_the_layers_dtype() -> None:
    """OLMo 2 computes angles in float32, and its own function gives what it was given."""
    module = attention_of("olmo2")
    plain = torch.bfloat16, PLAIN[1]

    def widened(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(turned(one, cos, sin) for one in (q, k))

    prove_rotation(registered(right), module, right(module), *plain)
    with pytest.raises(ExecutionError, match=r"gives torch.float32 .*torch.bfloat16"):
        prove_rotation(registered(right), module, widened, *plain)


def test_attentions_are_no_layers_of_one_tensor() -> None:
    class Odd(Mine):
        def bind(self, context: BindContext) -> Any:
            return FusedLayer(self.make)

    choice = Choice(Registered(Odd(lambda module: module), "stranger", "1.0", "ep"), None, "named")
    with pytest.raises(ExecutionError, match="LlamaAttention, which is no layer of one tensor"):
        bind_layers([choice], build("llama"), in_float32)


def test_auto_goes_on_without_a_wrong_one(caplog: pytest.LogCaptureFixture) -> None:
    choice = Choice(registered(lambda module: WRONG["turned back"](rotary_of(module))), None, AUTO)
    assert bind_layers([choice], build("llama"), in_float32) == []
    assert "does not rotate as LlamaAttention does" in caplog.text

"""Native calls of quantizers, attentions and caches: what is wrong with one is told as its own."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build, prompts
from wrong_caches import packed

import jackfield
from jackfield.bridge.native_offers import held_offers
from jackfield.contracts import Backend, NativeCall
from jackfield.errors import ExecutionError, JackfieldError
from jackfield.registry.backends import Registered
from jackfield_plugins.attention.cpu_decode.call import Kernel
from jackfield_plugins.compiler.native import kept
from jackfield_plugins.compiler.native.calls import Stretch
from jackfield_plugins.native import keeping
from jackfield_plugins.quantizer.groupwise import Groupwise
from jackfield_plugins.quantizer.groupwise.operator import NAME as OPERATOR


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("common") / "cache"


@pytest.fixture(autouse=True)
def _traced_once(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(common))


def offering(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> list[int]:
    """`int8-cpu` with what `change` makes of the call that it offers; the rows asked for."""
    whole, rows = Groupwise.native_operators, []

    def offered(self: Any) -> dict[str, Any]:
        (right,) = whole(self).values()

        def made(out: torch.Tensor, *args: Any, **named: Any) -> Any:
            rows.append(out.shape[1])
            return change(right(out, *args, **named))

        return {OPERATOR: made}

    monkeypatch.setattr(Groupwise, "native_operators", offered)
    return rows


def say(compiler: str = "native") -> list[list[int]]:
    arguments: Any = {"quantization": "int8-cpu", "cache_implementation": "paged"}
    with jackfield.load("demo", compile=compiler, **arguments) as engine:
        return [one.token_ids for one in engine.generate(prompts((5, 9)), max_new_tokens=6)]


def raising(_: Any) -> Any:
    raise RuntimeError("it is wrong")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (raising, "raised RuntimeError: it is wrong"),
        (lambda _: 7, "must return a NativeCall or None, got 7"),
        (lambda call: tuple(call)[:3], "must return a NativeCall or None"),
    ],
)
def test_it_is_told_as_the_quantizers(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], told: str
) -> None:
    offering(monkeypatch, change)
    with pytest.raises(JackfieldError) as caught:
        say()
    assert str(caught.value).startswith("quantizer 'int8-cpu' of jackfield")
    assert f"the native operator of {OPERATOR} {told}" in str(caught.value)


def test_one_that_says_no_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: False)
    address = ctypes.cast(no, ctypes.c_void_p).value
    offering(monkeypatch, lambda call: NativeCall(address, b"12345678", (no, call)))
    with pytest.raises(JackfieldError) as caught:
        say()
    assert f"{OPERATOR} says that it cannot compute ([1," in str(caught.value)
    assert "offer None and not a call" in str(caught.value)


def like(layer: Callable[..., None]) -> Callable[[Any], Any]:
    """A call in Python that writes what `layer` makes of the right output."""

    def change(call: NativeCall) -> NativeCall:
        right = FUNCTION(call.function)
        held = ctypes.create_string_buffer(call.arguments, len(call.arguments))

        def act(_: int) -> bool:
            done = right(ctypes.addressof(held))
            layer(*call.keeps)
            return bool(done)

        wrong = FUNCTION(act)
        address = ctypes.cast(wrong, ctypes.c_void_p).value
        return NativeCall(address or 0, b"12345678", (wrong, held, call))

    return change


FUNCTION = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
TOGETHER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)


def outputs(keeps: tuple[Any, ...], shape: Any = None) -> torch.Tensor:
    return next(one for one in reversed(keeps) if isinstance(one, torch.Tensor))


WRONG: dict[str, tuple[Callable[..., None], str]] = {
    "a little off": (lambda *k: outputs(k).mul_(1.01), "off those of the Python function"),
    "one row unwritten": (lambda *k: outputs(k)[..., -1:, :].fill_(math.nan), "unwritten"),
    "one number": (lambda *k: outputs(k)[..., -1].add_(1.0), "off those of the Python function"),
    "its input": (lambda *k: k[0].add_(1.0), "changes what it is given"),
}


@pytest.mark.parametrize(("act", "told"), WRONG.values(), ids=WRONG)
@pytest.mark.one_in(4)
def test_a_wrong_one_never_runs_in_a_step(
    monkeypatch: pytest.MonkeyPatch, act: Callable[..., None], told: str
) -> None:
    offering(monkeypatch, like(act))
    with pytest.raises(JackfieldError, match="quantizer 'int8-cpu'.*" + told):
        say()


def test_a_call_made_for_other_tensors_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept by shape, as if a layer were like the next."""
    first: dict[Any, NativeCall] = {}

    def change(call: NativeCall) -> NativeCall:
        return first.setdefault(len(first) and 1, call)

    offering(monkeypatch, change)
    with pytest.raises(JackfieldError, match="quantizer 'int8-cpu'"):
        say()


def test_several_at_once_are_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one input run as one call: here the last of them is left out."""
    kept: list[Any] = []

    def change(call: NativeCall) -> NativeCall:
        right = TOGETHER(call.together)
        wrong = TOGETHER(lambda arguments, count: bool(right(arguments, count - 1)))
        kept.append(wrong)
        return call._replace(together=ctypes.cast(wrong, ctypes.c_void_p).value or 0)

    first: list[NativeCall] = []

    def offered(call: NativeCall) -> NativeCall:
        first.extend([] if first else [change(call)])
        return call._replace(together=first[0].together)

    offering(monkeypatch, offered)
    with pytest.raises(JackfieldError, match=r"quantizer 'int8-cpu'.*unwritten"):
        say()


def test_names_that_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jackfield.groupwise_linear", "jackfield::groupwise_linear", "a.b.default", 3):
        monkeypatch.setattr(Groupwise, "native_operators", lambda _, name=name: {name: raising})
        with pytest.raises(JackfieldError, match="which is no operator of torch"):
            say()


def test_a_right_one_is_proven_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    due = say("none")
    rows = offering(monkeypatch, lambda call: call)
    assert say() == due
    assert rows


def test_one_that_offers_nothing_is_called_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    due = say("none")
    offering(monkeypatch, lambda _: None)
    assert say() == due


@torch.library.custom_op("test_native_offered::doubled_", mutates_args={"x"})
def doubled_(x: torch.Tensor) -> None:
    x.mul_(2)


def test_an_operator_that_changes_its_input_is_named() -> None:
    class Changing(torch.nn.Module):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            states = states.clone()
            doubled_(states)
            return states

    model = build("llama").__class__(build("llama").config).double()
    model.model.norm = Changing()
    with (
        jackfield.load(model, cache_implementation="paged", compile="native") as engine,
        pytest.raises(ExecutionError, match=r"doubled_\.default, which changes its arg"),
    ):
        engine.generate([5, 6, 7], max_new_tokens=3)


class Thing:
    """What a call keeps."""


def test_what_a_call_keeps_lives_until_another_is_put_in_its_place() -> None:
    stretch = Stretch(lambda first, count: -1)
    places = [stretch.reserve(f"layer {number}") for number in range(2)]
    stretch.close()
    things = []
    for place in (*places, places[0]):
        thing = Thing()
        things.append(weakref.ref(thing))
        stretch.put(place, NativeCall(8, b"12345678", (thing,)))
        del thing
    assert [thing() is not None for thing in things] == [False, True, True]


FLAWS: list[tuple[Callable[[NativeCall], Any], str]] = [
    (lambda _: 7, "must return a NativeCall or None, got 7"),
    (lambda call: call._replace(function=0), "has 0 for the address of a function"),
    (lambda call: call._replace(arguments=bytes(1025)), "has 1,025 bytes of arguments"),
]


@pytest.mark.parametrize(("change", "told"), FLAWS)
def test_what_an_attention_returns_is_looked_at_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], told: str
) -> None:
    whole = Kernel.native
    monkeypatch.setattr(Kernel, "native", lambda *args, **given: change(whole(*args, **given)))
    with pytest.raises(JackfieldError, match=rf"attention 'cpu_decode' of .*native .*{told}"):
        say()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda written: written[0], "must return a pair or None"),
        *(
            (lambda written, change=change: (written[0], change(written[1])), told)
            for change, told in FLAWS
        ),
    ],
)
def test_what_a_cache_returns_is_looked_at_before_it_runs(
    plug: Callable[[Backend], str], change: Callable[[Any], Any], told: str
) -> None:
    cache = plug(packed(native_write=lambda own, *args: change(own(*args))))
    with (
        jackfield.load("demo", compile="native", cache_implementation=cache) as engine,
        pytest.raises(JackfieldError, match=rf"cache 'wrong' of .*native_write .*{told}"),
    ):
        engine.generate(prompts((5, 9)), max_new_tokens=6)


@torch.library.custom_op("test_native_offered::picked", mutates_args=())
def picked(table: torch.Tensor, index: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Logarithms, which are NaN for half of what a proof draws, of rows of a table."""
    return table[index].log() * scale


def held(layer: Callable[[torch.Tensor], None] = lambda out: None) -> Any:
    """The operator above as a stranger's, which writes what it does and then `layer`."""
    kept: list[Any] = []

    def native(out: torch.Tensor, table: Any, index: Any, scale: Any) -> NativeCall:
        def act(_: int) -> bool:
            out.copy_(picked(table, index, scale))
            layer(out)
            return True

        kept.append(FUNCTION(act))
        return NativeCall(ctypes.cast(kept[-1], ctypes.c_void_p).value or 0, b"12345678")

    mine: Any = SimpleNamespace(
        kind="kernel",
        name="mine",
        native_operators=lambda: {"test_native_offered.picked.default": native},
    )
    (offered,) = held_offers(
        [Registered(mine, "stranger", "1.2", "ep")], torch.nn.Linear(1, 1)
    ).values()
    return offered


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_inputs_of_any_kind_are_proven(rows: int) -> None:
    """An index, one number for all, a table that has one row, results that are no numbers."""
    table, index = torch.rand(rows, 6) + 1, torch.tensor([0, rows - 1, 0])
    scale = torch.tensor([[3.0]]).expand(3, 6)
    due = picked(table, index, scale)
    given = [one.clone() for one in (table, index, scale)]
    assert held()(torch.empty_like(due), table, index, scale) is not None
    assert all(map(torch.equal, given, (table, index, scale)))
    wrong = held(lambda out: out[-1].mul_(1.1))
    with pytest.raises(JackfieldError, match=r"'mine' of stranger 1\.2: .*picked.* off those"):
        wrong(torch.empty_like(due), table, index, scale)

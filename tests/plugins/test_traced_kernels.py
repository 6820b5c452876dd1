"""Kernels that compilers trace: in native steps, as functions in C."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompts

import jackfield
from jackfield.contracts import NativeCall
from jackfield.errors import JackfieldError
from jackfield_plugins.compiler.native import kept
from jackfield_plugins.kernel.cpu_rms_norm import CpuRmsNorm
from jackfield_plugins.kernel.cpu_rms_norm.build import KERNEL
from jackfield_plugins.native import keeping

pytestmark = pytest.mark.skipif(bool(KERNEL.cannot_build()), reason="needs a C++ compiler")

OPERATOR = "jackfield.cpu_rms_norm.default"
NORMED = ("llama", "qwen3", "gemma2", "olmo2", "phi3")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(tmp_path))
    return tmp_path / "native-graphs"


def llama() -> Any:
    return build("llama", torch.float32)


def load(model: Any, compiler: str = "native", kernels: str = "cpu-rms-norm") -> Any:
    return jackfield.load(model, compile=compiler, kernels=kernels, cache_implementation="paged")


def said(engine: Any) -> tuple[list[list[int]], Any]:
    answers = engine.generate(prompts((5, 9)), max_new_tokens=8)
    return [one.token_ids for one in answers], answers[0].report


def graph(engine: Any) -> list[str]:
    graphs = engine._bound.compiled.compilation._graphs
    return [node.target for node in graphs[1, 2].nodes]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", NORMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_steps(family: str, dtype: torch.dtype, folder: Path) -> None:
    with load(build(family, dtype), "none") as engine:
        due, report = said(engine)
    with load(build(family, dtype)) as engine:
        found, counted = said(engine)
        assert OPERATOR in graph(engine)
        assert OPERATOR not in counted["compiler"].source
    assert found == due
    assert counted["kernel"].calls == report["kernel"].calls > 0


def test_what_it_takes_the_place_of_is_gone(folder: Path) -> None:
    sizes = []
    for kernels in ("none", "cpu-rms-norm"):
        with load(llama(), kernels=kernels) as engine:
            said(engine)
            sizes.append(len(graph(engine)))
            assert ("aten.rsqrt.default" in graph(engine)) == (kernels == "none")
    assert sizes[1] < sizes[0]


def test_graphs_are_kept_by_the_kernel(folder: Path) -> None:
    names: list[set[str]] = []
    for kernels in ("none", "cpu-rms-norm", "cpu-rms-norm"):
        with load(llama(), kernels=kernels) as engine:
            said(engine)
        names.append({file.name for file in folder.iterdir()})
    assert names[0] < names[1] == names[2]


def test_weights_that_change_are_read(folder: Path) -> None:
    model = llama()
    with load(model) as engine:
        before, _ = said(engine)
        model.model.norm.weight.data.neg_()
        after, _ = said(engine)
    with load(model, "none", "none") as engine:
        assert said(engine)[0] == after != before


def test_the_model_is_its_own_again(folder: Path) -> None:
    model = llama()
    with load(model) as engine:
        said(engine)
    assert not any("forward" in vars(module) for module in model.modules())


def changed(change: Callable[[NativeCall], Any]) -> Any:
    whole = CpuRmsNorm.native_operators

    def offered(self: CpuRmsNorm) -> dict[str, Any]:
        (right,) = whole(self).values()
        return {OPERATOR: lambda *args, **named: change(right(*args, **named))}

    return offered


def with_another_epsilon(call: NativeCall) -> NativeCall:
    own = call.arguments
    return call._replace(arguments=own[:40] + struct.pack("@d", 9.0) + own[48:])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda call: 7, "must return a NativeCall or None, got 7"),
        (with_another_epsilon, "writes numbers"),
    ],
)
def test_a_wrong_one_is_the_kernels(
    change: Any, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuRmsNorm, "native_operators", changed(change))
    with load(llama()) as engine, pytest.raises(JackfieldError) as caught:
        said(engine)
    assert str(caught.value).startswith("kernel 'cpu-rms-norm' of jackfield")
    assert f"the native operator of {OPERATOR} {told}" in str(caught.value)


def test_one_that_offers_nothing_is_called_from_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(llama(), "none") as engine:
        due, _ = said(engine)
    monkeypatch.setattr(CpuRmsNorm, "native_operators", lambda self: {})
    with load(llama()) as engine:
        found, report = said(engine)
    assert found == due
    assert f"in Python: {OPERATOR}" in report["compiler"].source


def test_two_that_offer_one_operator_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackfield_plugins.quantizer.none import NoQuantizer

    offered = CpuRmsNorm().native_operators()
    monkeypatch.setattr(NoQuantizer, "native_operators", lambda self: offered)
    with pytest.raises(JackfieldError, match=f"offers {OPERATOR}, and so does another backend"):
        load(llama())

"""Layers of small integers with activations of 8 bits: against the oracle, planned, loaded."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import rounded
from samples import sampled

import jackfield
from jackfield.errors import JackfieldError
from jackfield_plugins.native import compiling
from jackfield_plugins.quantizer.activations import INT8_ERROR
from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.native import INT8_KERNEL, Int8Product, NativeProduct
from jackfield_plugins.quantizer.groupwise.quantize import (
    DTYPES,
    GROUP_SIZES,
    Quantized,
    dequantize,
    quantize,
)

if TYPE_CHECKING:
    from forking import Forks

pytestmark = pytest.mark.skipif(
    bool(INT8_KERNEL.cannot_build()), reason="needs a C++ compiler, on Linux"
)
FORMS = [(bits, dtype) for bits in DTYPES for dtype in DTYPES[bits]]
#: How far a product may be from the exact one, as a share of its norm: rounding alone.
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 2**-20}
QUESTION = [{"role": "user", "content": "Sort these numbers: 41 7 88 23"}]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer_of(inputs, outputs, bits, dtype, *, group_size=32, bias=True):
    """A layer, and the float64 weights that it means."""
    drawn = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=drawn) * inputs**-0.5
    stored = quantize(weight, group_size=group_size, bits=bits)
    new = GroupwiseLinear(
        inputs, outputs, bias, Int8Product(), group_size=group_size, bits=bits, dtype=dtype
    )
    new.set_weight(stored, torch.randn(outputs, generator=drawn) if bias else None)
    return new, dequantize(stored, bits=bits).double()


def assert_right(rows, inputs, outputs, bits, dtype, *, group_size=32, bias=True) -> None:
    new, weight = layer_of(inputs, outputs, bits, dtype, group_size=group_size, bias=bias)
    hidden = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    found = new(hidden)
    exact = rounded(hidden) @ weight.T + (new.bias.double() if bias else 0)
    assert found.dtype is dtype
    assert (found.double() - exact).norm() <= BOUNDS[dtype] * exact.norm()


@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from((47, 48, 49, 96, 131))),
    groups=st.integers(1, 5),
    group_size=st.sampled_from(GROUP_SIZES),
    outputs=st.one_of(st.integers(1, 200), st.sampled_from((16, 64, 128, 650))),
    bias=st.booleans(),
    form=st.sampled_from(FORMS),
    count=st.sampled_from((1, 2, 3)),
)
def test_kernel_equals_the_oracle(rows, groups, group_size, outputs, bias, form, count) -> None:
    torch.set_num_threads(count)
    inputs = groups * group_size
    assert_right(rows, inputs, outputs, *form, group_size=group_size, bias=bias)


@pytest.mark.parametrize(("bits", "dtype"), FORMS)
def test_integers_are_exact(bits: int, dtype: torch.dtype) -> None:
    """A row of the identity reads off a column of weights, whatever the place and the number."""
    every = torch.arange(256 * bits // 8, dtype=torch.int64) * 37 % 256  # 37 is odd: each byte
    stored = Quantized(every.to(torch.uint8).repeat(70, 1), torch.ones(70, 8).bfloat16())
    new, _ = layer_of(256, 70, bits, dtype, bias=False)
    new.set_weight(stored)
    found = new(torch.eye(256, dtype=dtype)).float().T
    torch.testing.assert_close(found, dequantize(stored, bits=bits), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "dtype"), FORMS)
def test_bits_depend_neither_on_the_batch_nor_on_threads(bits: int, dtype: torch.dtype) -> None:
    new, _ = layer_of(896, 200, bits, dtype, group_size=128)
    hidden = torch.randn(140, 896).to(dtype)
    torch.set_num_threads(2)
    together = new(hidden)
    for number, rows in enumerate((*range(1, 14), 48, 49)):
        torch.set_num_threads(1 + number % 3)
        assert torch.equal(new(hidden[:rows]), together[:rows]), rows


def test_not_a_number_stays_in_its_row() -> None:
    new, _ = layer_of(64, 20, 4, torch.bfloat16)
    for value in (float("nan"), float("inf")):
        hidden = torch.zeros(3, 64).bfloat16()
        hidden[1, 5] = value
        assert new(hidden).isfinite().all(-1).tolist() == [True, False, True]
        assert not new(hidden)[1].isfinite().any()


@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_as_near_as_the_plan_says(bits: int) -> None:
    new, weight = layer_of(1024, 200, bits, torch.bfloat16, bias=False)
    hidden = torch.randn(20, 1024).bfloat16()
    exact = hidden.double() @ weight.T
    assert (new(hidden).double() - exact).norm() <= INT8_ERROR * exact.norm()


def test_weights_are_those_of_the_other_kernel() -> None:
    new, _ = layer_of(128, 70, 4, torch.bfloat16)
    other = GroupwiseLinear(128, 70, True, NativeProduct())
    other.load_state_dict(new.state_dict())
    assert torch.equal(other.qweight, new.qweight)
    hidden = torch.randn(3, 128).bfloat16()
    again = copy.deepcopy(new)
    assert torch.equal(again(hidden), new(hidden))
    assert not torch.equal(other(hidden), new(hidden))
    assert "kernel=int8" in str(new)


FLAGS = ("-mno-avx512vnni", "-mno-avx512bf16", "-mno-avx512f", "-mno-avx2", "-mno-avx")


@pytest.mark.parametrize("flag", sampled(FLAGS, 5))
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's flags")
@pytest.mark.long
def test_processors_without_its_instructions(tmp_path: Path, flag: str, forks: Forks) -> None:
    command = compiling.compiler()
    assert command is not None
    program = (
        "import sys; sys.path += sys.argv[1:]\n"
        "from sanitizing import trapping\n"
        "import test_groupwise_int8 as t\n"
        "t.compiling.FLAGS = trapping('-O1')\n"
        "for form in t.FORMS:\n"
        "    t.test_integers_are_exact(*form)\n"
        "    t.test_bits_depend_neither_on_the_batch_nor_on_threads(*form)\n"
        "    for rows in (1, 3, 9, 50):\n"
        "        t.assert_right(rows, 256, 70, *form, group_size=64)"
    )
    environ = {**os.environ, "CXX": f"{command[0]} {flag}", "XDG_CACHE_HOME": str(tmp_path)}
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "conformance")]
    done = forks.python("-c", program, *folders, env=environ)
    assert done.returncode == 0, done.stderr


# --- as backends ---


@pytest.mark.parametrize("quantizer", ["int4-cpu", "int8-cpu"])
def test_the_demo_answers(quantizer: str, tmp_path: Path) -> None:
    selected = f"{quantizer}?activations=int8"
    with jackfield.load("demo", quantization=selected, deterministic=True) as engine:
        (answer,) = engine.generate([QUESTION])
        assert answer.text == "7 23 41 88"
        assert answer.report["quantizer"].source.endswith("linear layers, with int8 activations")
        layers = [m for m in engine.model.modules() if isinstance(m, GroupwiseLinear)]
        assert {layer.product.name for layer in layers} == {"int8"}
        engine.model.save_pretrained(tmp_path)
        engine.tokenizer.save_pretrained(tmp_path)
    dtype = f"{quantizer}?activations=dtype"
    for named, name in (("", "int8"), (selected, "int8"), (dtype, "native")):
        how = {"quantization": named} if named else {}
        with jackfield.load(tmp_path, **how) as engine:
            layers = [m for m in engine.model.modules() if isinstance(m, GroupwiseLinear)]
            assert {layer.product.name for layer in layers} == {name}
            assert engine.generate([QUESTION])[0].text == "7 23 41 88"


def test_native_steps_say_the_same() -> None:
    with jackfield.load("demo", quantization="int4-cpu?activations=int8") as engine:
        (wanted,) = engine.generate(["Once upon a time"], max_new_tokens=12)
    with jackfield.load(
        "demo", quantization="int4-cpu?activations=int8", compile="native"
    ) as engine:
        (found,) = engine.generate(["Once upon a time"], max_new_tokens=12)
        assert "in Python" not in engine.report()["compiler"].source
    assert found.token_ids == wanted.token_ids


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JackfieldError, match="takes activations as they are"):
        jackfield.load("demo", quantization="int4-cpu?activations=int8&kernel=torch")
    with jackfield.load("demo", quantization="int4-cpu") as engine:
        live = copy.deepcopy(engine.model)
    with pytest.raises(JackfieldError, match="when weights are read, not of a live model"):
        jackfield.load(live, quantization="int4-cpu?activations=int8")
    monkeypatch.setenv("CXX", "no-such-compiler")
    for quantizer in ("int4-cpu", "int8-cpu"):
        with pytest.raises(JackfieldError, match=r"needs a C\+\+ compiler"):
            jackfield.load("demo", quantization=f"{quantizer}?activations=int8")

"""Linear layers of small integers: both kernels against the oracle, and what is stored."""

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
from native_calls import stretch_of
from samples import sampled
from torch import nn
from torch.nn.functional import linear

from jackfield.errors import ExecutionError, PlanError
from jackfield_plugins.compiler.native.calls import Done
from jackfield_plugins.compiler.native.siblings import joined
from jackfield_plugins.native import compiling
from jackfield_plugins.quantizer.groupwise import layout
from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.native import KERNEL, NativeProduct
from jackfield_plugins.quantizer.groupwise.quantize import (
    DTYPES,
    GROUP_SIZES,
    Product,
    Quantized,
    cannot_quantize,
    dequantize,
    quantize,
)
from jackfield_plugins.quantizer.groupwise.torch_kernel import TorchProduct

if TYPE_CHECKING:
    from forking import Forks

PRODUCTS = ("native", "torch")
#: What the kernel written here has: bits, and the dtype of activations.
FORMS = [(bits, dtype) for bits in DTYPES for dtype in DTYPES[bits]]


def product_of(name: str) -> Product:
    if name == "native" and KERNEL.cannot_build():
        pytest.skip("needs a C++ compiler, on Linux")
    return {"native": NativeProduct, "torch": TorchProduct}[name]()


def layer_of(
    name: str, inputs: int, outputs: int, *, bias: bool = True, group_size: int = 32, bits: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[GroupwiseLinear, nn.Linear]:  # fmt: skip
    """A layer, and one of float64 with the weights that it means."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    new = GroupwiseLinear(
        inputs, outputs, bias, product_of(name), group_size=group_size, bits=bits, dtype=dtype
    )
    quantized = quantize(weight, group_size=group_size, bits=bits)
    added = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    new.set_weight(quantized, added)
    exact = nn.Linear(inputs, outputs, bias, dtype=torch.float64).requires_grad_(False)
    exact.weight.copy_(dequantize(quantized, bits=bits))
    if added is not None:
        exact.bias.copy_(added)
    return new, exact


def assert_as_good_as_torch(new: GroupwiseLinear, exact: nn.Linear, hidden: torch.Tensor) -> None:
    """No farther from the exact result than torch's product of the same weights, twice.

    Or than one rounding of each product in float32: by luck torch's sum of one output is exact.
    """
    found, true, dtype = new(hidden), exact(hidden.double()), hidden.dtype
    assert found.dtype is dtype
    assert found.shape == true.shape
    weight = exact.weight.to(dtype)  # in bfloat16 this product pays for rounding them
    bias = None if exact.bias is None else exact.bias.to(dtype)
    rough = linear(hidden, weight, bias)
    bound = 2 * (rough.double() - true).abs().max() + true.abs().max() * torch.finfo(dtype).eps
    products = linear(hidden.double().abs(), exact.weight.abs())
    bound += products.max() * torch.finfo(torch.float32).eps
    assert (found.double() - true).abs().max() <= bound


@given(
    name=st.sampled_from(PRODUCTS),
    rows=st.one_of(st.integers(1, 20), st.sampled_from((47, 48, 49, 96, 131, 300))),
    groups=st.integers(1, 9),
    group_size=st.sampled_from(GROUP_SIZES),
    outputs=st.one_of(st.integers(1, 200), st.sampled_from((16, 64, 128, 896))),
    bias=st.booleans(),
    form=st.sampled_from(FORMS),
    threads=st.sampled_from((1, 2)),
)
def test_kernel_equals_the_oracle(
    name, rows, groups, group_size, outputs, bias, form, threads
) -> None:
    bits, dtype = form if name == "native" else FORMS[0]
    inputs = groups * group_size
    new, exact = layer_of(
        name, inputs, outputs, bias=bias, group_size=group_size, bits=bits, dtype=dtype
    )
    hidden = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_as_good_as_torch(new, exact, hidden)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "dtype"), FORMS)
def test_integers_are_exact(bits: int, dtype: torch.dtype) -> None:
    """A row of the identity reads off a column of weights, whatever the place and the number."""
    new, exact = layer_of("native", 256, 70, bias=False, bits=bits, dtype=dtype)
    found = new(torch.eye(256, dtype=dtype))
    assert torch.equal(found, exact.weight.T.to(dtype))
    every = torch.arange(256 * bits // 8, dtype=torch.int64) * 37 % 256  # 37 is odd: each byte
    stored = Quantized(every.to(torch.uint8).repeat(70, 1), torch.ones(70, 8).bfloat16())
    new.set_weight(stored)
    assert torch.equal(new(torch.eye(256, dtype=dtype)).float().T, dequantize(stored, bits=bits))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_any_leading_shape(name: str, shape: tuple[int, ...]) -> None:
    new, exact = layer_of(name, 64, 20)
    hidden = torch.randn(*shape).bfloat16()
    if name == "torch" and 0 in shape:
        assert new(hidden).shape == (*shape[:-1], 20)
    elif 0 in shape:
        assert new(hidden).numel() == 0
    else:
        assert_as_good_as_torch(new, exact, hidden)


@pytest.mark.parametrize("name", PRODUCTS)
def test_input_that_is_not_contiguous(name: str) -> None:
    new, exact = layer_of(name, 64, 20)
    assert_as_good_as_torch(new, exact, torch.randn(5, 128).bfloat16()[:, ::2])
    assert_as_good_as_torch(new, exact, torch.randn(64, 7).bfloat16().T)
    assert_as_good_as_torch(new, exact, torch.randn(9, 65).bfloat16()[::3, 1:])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("bits", "dtype"), FORMS)
@pytest.mark.usefixtures("threads")
def test_native_bits_depend_neither_on_the_batch_nor_on_threads(
    bits: int, dtype: torch.dtype, group_size: int
) -> None:
    new, _ = layer_of("native", 896, 650, bits=bits, dtype=dtype, group_size=group_size)
    hidden = (torch.randn(140, 896) * (2 * torch.randn(140, 896)).exp()).to(dtype)
    torch.set_num_threads(2)
    together = new(hidden)
    torch.set_num_threads(1)
    for rows in (*range(1, 14), 16, 17, 48, 49, 128, 129, 133):
        assert torch.equal(new(hidden[:rows]), together[:rows]), rows
    assert NativeProduct.batch_invariant
    assert not TorchProduct.batch_invariant


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.usefixtures("threads")
def test_products_run_together_give_the_same_bits(count: int) -> None:
    """Of one value and of another one; threads take parts of several at once."""
    torch.set_num_threads(2)
    inputs = [torch.randn(count, 512).bfloat16() for _ in range(2)]
    calls, outs, dues = [], [], []
    for at, outputs in enumerate((70, 650, 370, 130, 650)):
        new, _ = layer_of("native", 512, outputs, bits=(4, 8)[at % 2], bias=False)
        hidden = inputs[at // 3]
        dues.append(new(hidden))
        outs.append(torch.full_like(dues[-1], 77))
        packed = Quantized(new.qweight, new.scales)
        call = new.product.native(outs[-1], hidden, packed, None, new._sizes)  # type: ignore[attr-defined]
        calls.append(Done("groupwise", call, sibling=at > 0))
    (whole,) = joined(calls)
    assert isinstance(whole, Done)
    stretch_of([(whole.name, whole.call)])()
    assert all(map(torch.equal, outs, dues))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_sums_of_the_largest_numbers_are_exact(group_size: int) -> None:
    """As large as can be, and odd; what a group adds, the next takes away, in another order."""
    new = GroupwiseLinear(512, 70, False, product_of("native"), group_size=group_size)
    once = torch.randint(-8, -6, (70, 256 // group_size, group_size)).float()
    once[..., 0] = -8
    weight = torch.stack([once, once.roll(32, -1)], 2).flatten(1)
    quantized = quantize(weight, group_size=group_size)
    assert torch.equal(dequantize(quantized), weight)
    new.set_weight(quantized, None)
    odd = 2.0**-14 * (2 * torch.randint(0, 100, (20, 256 // group_size, group_size)) + 1)
    hidden = torch.where(torch.rand(odd.shape) < 0.1, odd, 2 - 2**-7)
    hidden[..., 0] = 2 - 2**-7
    hidden = torch.stack([hidden, -hidden.roll(32, -1)], 2).flatten(1).bfloat16()
    found = new(hidden)
    assert group_size == 128 or not found.any()  # of 128, two sums are rounded on their way
    for rows in (1, 5, 6, 9):
        assert torch.equal(new(hidden[:rows]), found[:rows])


@pytest.mark.parametrize("name", PRODUCTS)
def test_infinity_and_not_a_number_reach_every_output(name: str) -> None:
    new, _ = layer_of(name, 64, 20)
    hidden = torch.zeros(2, 64).bfloat16()
    hidden[0, 5] = float("nan")
    found = new(hidden)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


# --- what is stored ---


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("outputs", [1, 63, 64, 65, 130])
def test_state_dict_is_canonical_and_comes_back_bit_by_bit(name: str, outputs: int) -> None:
    weight = torch.randn(outputs, 128)
    expected = quantize(weight)
    old = GroupwiseLinear(128, outputs, True, product_of(name))
    old.set_weight(expected, torch.randn(outputs))
    state = old.state_dict()
    assert torch.equal(state["qweight"], expected.qweight)
    assert torch.equal(state["scales"], expected.scales)
    for other in PRODUCTS:
        new = GroupwiseLinear(128, outputs, True, product_of(other))
        new.load_state_dict(state)
        for key, tensor in new.state_dict().items():
            assert torch.equal(tensor, state[key]), key
    hidden = torch.randn(2, 128).bfloat16()
    again = GroupwiseLinear(128, outputs, True, product_of(name))
    again.load_state_dict(state)
    assert torch.equal(again(hidden), old(hidden))


@pytest.mark.parametrize("bits", [4, 8])
def test_layout_is_undone(bits: int) -> None:
    qweight = torch.randint(0, 256, (70, 32 * bits), dtype=torch.uint8)
    quantized = Quantized(qweight, torch.randn(70, 8).bfloat16())
    back = layout.unpack(layout.pack(quantized, bits), 70, bits)
    assert torch.equal(back.qweight, quantized.qweight)
    assert torch.equal(back.scales, quantized.scales)


def test_one_copy_of_the_weights() -> None:
    """4.5 bits a weight, scales included, and nothing beside them."""
    new, _ = layer_of("native", 256, 128, bias=False)
    held = sum(t.numel() * t.element_size() for t in (*new.buffers(), *new.parameters()))
    assert held == 256 * 128 * 4.5 / 8


def test_a_copy_does_not_read_the_memory_of_its_original() -> None:
    new, _ = layer_of("native", 64, 20)
    hidden = torch.randn(1, 64).bfloat16()
    expected = new(hidden)
    other = copy.deepcopy(new)
    new.qweight.zero_()
    assert torch.equal(other(hidden), expected)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_search_beats_rounding_to_the_largest(group_size: int) -> None:
    """The largest weight becomes -8, as in llama.cpp's Q4_0."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    groups = weight.view(-1, group_size)
    scale = groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -8
    plain = (groups / scale).round().clamp(-8, 7) * scale
    found = dequantize(quantize(weight, group_size=group_size))
    error, bound = (found - weight).square().sum(), (plain - groups).square().sum()
    assert error < 0.91 * bound


def test_weights_that_are_integers_already_stay_what_they_are() -> None:
    integers = torch.randint(-8, 8, (20, 64)).float()
    integers[:, ::32] = -8
    assert torch.equal(dequantize(quantize(integers / 4)), integers / 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_extreme_sizes(bits: int) -> None:
    weight = torch.zeros(4, 64)
    weight[1], weight[2], weight[3] = 1e-30, -3e38, 1e-45
    found = dequantize(quantize(weight, bits=bits), bits=bits)
    assert found.isfinite().all()
    assert torch.equal(found[0], weight[0])
    torch.testing.assert_close(found[1:3], weight[1:3], rtol=0.01, atol=0)


def test_quantizing_does_not_depend_on_the_dtype_it_is_given() -> None:
    weight = torch.randn(300, 1024).bfloat16()
    for one, other in zip(quantize(weight), quantize(weight.double()), strict=True):
        assert torch.equal(one, other)


# --- what is refused ---


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (torch.zeros(1, 64), "takes bfloat16, not torch.float32: load with dtype='bfloat16'"),
        (torch.zeros(1, 32, dtype=torch.bfloat16), "has 64 inputs, not 32"),
        (torch.zeros(1, 64, dtype=torch.bfloat16, requires_grad=True), "computes no gradients"),
    ],
)
def test_what_it_cannot_read_is_refused(hidden: torch.Tensor, message: str) -> None:
    new, _ = layer_of("torch", 64, 20)
    with pytest.raises(ExecutionError, match=message):
        new(hidden)


def test_a_layer_without_weights_is_refused() -> None:
    empty = GroupwiseLinear(64, 20, False, TorchProduct())
    with pytest.raises(ExecutionError, match="has no weights yet"):
        empty(torch.zeros(1, 64, dtype=torch.bfloat16))
    assert empty(torch.zeros(3, 64, dtype=torch.bfloat16, device="meta")).shape == (3, 20)


def test_dtypes_that_a_layer_goes_to() -> None:
    """Of 4 bits none but bfloat16; of 8 bits float32 too, and its scales stay as they are."""
    new, _ = layer_of("torch", 64, 20)
    new.to(torch.bfloat16)
    with pytest.raises(ExecutionError, match=r"in bfloat16, not in torch.float32"):
        new.float()
    assert new.scales.dtype is new.bias.dtype is torch.bfloat16
    eight, exact = layer_of("native", 64, 20, bits=8)
    state = eight.state_dict()
    assert_as_good_as_torch(eight.float(), exact, torch.randn(3, 64))
    assert eight.weight.dtype is torch.float32
    assert all(torch.equal(state[name], found) for name, found in eight.state_dict().items())
    assert_as_good_as_torch(eight.bfloat16(), exact, torch.randn(3, 64).bfloat16())
    with pytest.raises(ExecutionError, match="int8-cpu computes in bfloat16 or float32, not in"):
        eight.half()


@pytest.mark.parametrize(
    ("shape", "group_size", "reason"),
    [
        ((8, 96), 64, "has 96 inputs, not a multiple of the group's 64"),
        ((8, 100), 32, "has 100 inputs"),
        ((2, 8, 64), 32, "has 3 dimensions, not 2"),
    ],
)
def test_what_cannot_be_quantized_says_why(
    shape: tuple[int, ...], group_size: int, reason: str
) -> None:
    assert reason in cannot_quantize(torch.zeros(shape), group_size)[0]
    with pytest.raises(ExecutionError, match=reason):
        quantize(torch.zeros(shape), group_size=group_size)
    assert not cannot_quantize(torch.zeros(8, 128), group_size)


def test_bad_weights_are_refused() -> None:
    with pytest.raises(ExecutionError, match="infinite or not a number"):
        quantize(torch.full((2, 32), float("inf")))
    new = GroupwiseLinear(64, 20, False, TorchProduct())
    with pytest.raises(ExecutionError, match=r"qweight .* is torch.uint8 \[20, 32\], not"):
        new.set_weight(quantize(torch.zeros(20, 32)))
    with pytest.raises(ExecutionError, match="in groups of 48"):
        GroupwiseLinear(96, 20, False, TorchProduct(), group_size=48)
    eight = GroupwiseLinear(64, 20, False, TorchProduct(), bits=8)
    with pytest.raises(PlanError, match="torch's kernel has no weights of 8 bits"):
        eight.set_weight(quantize(torch.zeros(20, 64), bits=8))


@pytest.mark.parametrize("flag", sampled(["-mno-avx512bf16", "-mno-avx512f", "-mno-avx"], 3))
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's flags")
@pytest.mark.skipif(bool(KERNEL.cannot_build()), reason="needs a C++ compiler, on Linux")
def test_processors_without_its_instructions(tmp_path: Path, flag: str, forks: Forks) -> None:
    command = compiling.compiler()
    assert command is not None
    program = (
        "import sys; sys.path += sys.argv[1:]\n"
        "from sanitizing import trapping\n"
        "import test_groupwise_kernel as t\n"
        "t.compiling.FLAGS = trapping('-O1')\n"
        "for form in t.FORMS:\n"
        "    t.test_integers_are_exact(*form)\n"
        "    t.test_native_bits_depend_neither_on_the_batch_nor_on_threads(*form, 64)\n"
        "    for rows in (1, 3, 4, 50):\n"
        "        t.test_kernel_equals_the_oracle.hypothesis.inner_test(\n"
        "            'native', rows, 5, 32, 70, True, form, 2)"
    )
    environ = {**os.environ, "CXX": f"{command[0]} {flag}", "XDG_CACHE_HOME": str(tmp_path)}
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "conformance")]
    done = forks.python("-c", program, *folders, env=environ)
    assert done.returncode == 0, done.stderr

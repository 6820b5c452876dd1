"""Products with blocks of GGUF files, and rows of them, against what the blocks stand for."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import stretch_of
from refused_tiles import run_without_tiles
from rounding import rounded
from samples import sampled, share

from jackfield.errors import ExecutionError
from jackfield_plugins.compiler.native.calls import Done
from jackfield_plugins.compiler.native.siblings import joined
from jackfield_plugins.native import compiling
from jackfield_plugins.quantizer.activations import INT8_ERROR
from jackfield_plugins.quantizer.gguf.layers import GgufEmbedding, GgufLinear
from jackfield_plugins.quantizer.gguf.native import (
    BLOCKS,
    KERNELS,
    Matrix,
    linear,
    native_linear,
    pack,
    rows,
)

pytest.importorskip("gguf", reason="needs jackfield[gguf]")
from gguf_files import OFTEN, Type, random_blocks, sometimes, weights

if TYPE_CHECKING:
    from forking import Forks

pytestmark = pytest.mark.skipif(
    bool(KERNELS["Q4_0"].cannot_build()), reason="needs a C++ compiler, on Linux"
)
DTYPES = (torch.bfloat16, torch.float32)
KINDS = sometimes(BLOCKS)
#: How far a product may be from the exact one, as a share of its norm: rounding alone.
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 2**-20}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrix_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> Any:
    """Packed blocks, what they are, and the weights that they stand for."""
    blocks = random_blocks(Type[kind], outputs, inputs, seed=seed)
    matrix = Matrix(kind, outputs, inputs)
    return pack(torch.from_numpy(blocks), matrix), matrix, weights(blocks, Type[kind])


def assert_right(
    kind: str, count: int, outputs: int, inputs: int, dtype: Any, bias: bool, int8: bool = False
) -> None:
    packed, matrix, weight = matrix_of(kind, outputs, inputs, seed=outputs + inputs)
    drawn = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, inputs, generator=drawn).to(dtype)
    added = torch.randn(outputs, generator=drawn).to(dtype) if bias else None
    found = linear(hidden, packed, added, matrix, int8)
    given = rounded(hidden) if int8 else hidden.double()
    exact = given @ weight.double().T + (0 if added is None else added.double())
    assert found.dtype is dtype
    assert found.shape == exact.shape
    # Of few outputs all terms may cancel: torch's own product is then up to 178 roundings of the
    # result off. What was added up is as large as ever.
    terms = given.square() @ weight.double().square().T
    added_up = (terms + (0 if added is None else added.double().square())).sum().sqrt()
    bound = BOUNDS[dtype] * max(exact.norm(), added_up)
    assert (found.double() - exact).norm() <= bound


@pytest.mark.parametrize("kind", KINDS)
@given(
    count=st.one_of(st.integers(1, 33), st.sampled_from((47, 48, 49, 131))),
    blocks=st.integers(1, 5),
    outputs=st.one_of(st.integers(1, 200), st.sampled_from((16, 64, 128, 650))),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    threads=st.sampled_from((1, 2, 3)),
    int8=st.booleans(),
)
@settings(max_examples=share(0.5))
def test_kernel_equals_the_oracle(kind, count, blocks, outputs, dtype, bias, threads, int8) -> None:
    torch.set_num_threads(threads)
    assert_right(kind, count, outputs, blocks * BLOCKS[kind].inputs, dtype, bias, int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_type_at_any_number_of_rows(kind: str, int8: bool) -> None:
    for count in range(1, 34):
        assert_right(kind, count, 70, 512, DTYPES[count % 2], count % 3 == 0, int8)


def test_activations_of_8_bits() -> None:
    """Ties go to even; a group of zeros, or of next to nothing, is nothing."""
    packed, matrix, weight = matrix_of("Q8_0", 70, 128)
    hidden = torch.zeros(4, 128)
    hidden[0, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -0.49])
    hidden[1, 32:64] = 1e-35
    hidden[2, 64] = 1e37
    hidden[3, 96:] = torch.linspace(-1, 1, 32)
    wanted = torch.zeros(4, 128, dtype=torch.double)
    wanted[0, :5] = torch.tensor([127.0, 0, 2, -2, 0])
    wanted[2:] = rounded(hidden[2:])
    found = linear(hidden, packed, None, matrix, int8=True)
    torch.testing.assert_close(found.double(), wanted @ weight.double().T, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("kind", KINDS)
def test_8_bits_are_as_near_as_the_plan_says(kind: str) -> None:
    packed, matrix, weight = matrix_of(kind, 200, 1024)
    hidden = torch.randn(20, 1024)
    exact = hidden.double() @ weight.double().T
    found = linear(hidden, packed, None, matrix, int8=True)
    assert (found - exact).norm() <= INT8_ERROR * exact.norm()


@pytest.mark.parametrize("count", [1, 4, 9])
def test_bfloat16_beside_a_large_number_stays_what_it_is(count: int) -> None:
    """Also where activations become whole numbers that share a scale: of 16 bits, not of 8."""
    blocks = random_blocks(Type.Q8_0, 200, 512, seed=1)
    blocks[:, 2::34] = 0  # the weights of each 32nd input
    matrix, weight = Matrix("Q8_0", 200, 512), weights(blocks, Type.Q8_0).double()
    hidden = torch.randn(count, 512).bfloat16()
    hidden[:, ::32] = 300
    found = linear(hidden, pack(torch.from_numpy(blocks), matrix), None, matrix).double()
    exact = hidden.double() @ weight.T
    off = 5 * 300 * 2**-16 * weight.norm(dim=1)
    assert ((found - exact).abs() <= exact.abs() * 2**-8 + off).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_blocks_stand_for(kind: str) -> None:
    packed, matrix, weight = matrix_of(kind, 130, 512)
    index = torch.tensor([[0, 63, 64], [129, 5, 5]])
    found = rows(index, packed, matrix, torch.float32)
    # A multiplication and a difference, rounded once or twice.
    torch.testing.assert_close(found, weight[index], rtol=1e-6, atol=1e-6)
    rough = rows(index.int(), packed, matrix, torch.bfloat16)
    torch.testing.assert_close(rough, weight[index].bfloat16(), rtol=2**-7, atol=1e-6)
    assert rows(index[:0], packed, matrix, torch.float32).shape == (0, 3, 512)
    for wrong in (-1, 130, 1 << 40):
        with pytest.raises(ExecutionError, match=f"row {wrong} of 130"):
            rows(torch.tensor([3, wrong]), packed, matrix, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_exact(kind: str, dtype: torch.dtype) -> None:
    """A row of the identity reads off a column of weights, whatever the place."""
    packed, matrix, weight = matrix_of(kind, 70, 512)
    found = linear(torch.eye(512, dtype=dtype), packed, None, matrix).T
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.float(), weight, rtol=rounding, atol=rounding / 8)


def far_apart(count: int, size: int) -> torch.Tensor:
    """Numbers whose sums hang on their order, and rows of the smallest and of the largest."""
    found = torch.randn(count, size) * (2 * torch.randn(count, size)).exp()
    found[::128] *= 2.0**-125
    found[3::64] = torch.randn(size) * 2.0**112
    return found


def largest(count: int, size: int) -> torch.Tensor:
    """Even ones have sums as large as can be, and odd; odd ones take nearly all of it away."""
    found = torch.full((count, size), 2 - 2**-7)
    found[:, 6::32] = 2.0**-14 * torch.randint(1, 100, (count, size // 32))
    found[:, 15::32] = 2.0**-14
    found[:, 1::2] *= -1
    return found


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_neither_on_the_batch_nor_on_threads(
    kind: str, dtype: torch.dtype, int8: bool
) -> None:
    packed, matrix, _ = matrix_of(kind, 650, 1024)  # units of 64, four at a time, and three more
    hidden = far_apart(140, 1024).to(dtype)
    torch.set_num_threads(2)
    together = linear(hidden, packed, None, matrix, int8)
    for number, count in enumerate((*range(1, 14), 16, 17, 48, 49, 128, 129, 130, 133)):
        torch.set_num_threads(1 + number % 3)
        found = linear(hidden[:count], packed, None, matrix, int8)
        assert torch.equal(found, together[:count]), count


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_numbers_are_exact(kind: str) -> None:
    blocks = random_blocks(Type[kind], 70, 512, byte=255)
    packed, matrix = pack(torch.from_numpy(blocks), Matrix(kind, 70, 512)), Matrix(kind, 70, 512)
    hidden = largest(20, 512).bfloat16()
    found = linear(hidden, packed, None, matrix)
    exact = hidden.double() @ weights(blocks, Type[kind]).double().T
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=0)
    for count in (1, 2, 5, 6, 9):
        assert torch.equal(linear(hidden[:count], packed, None, matrix), found[:count])


@pytest.mark.parametrize("int8", [False, True])
def test_infinity_and_not_a_number_reach_every_output(int8: bool) -> None:
    packed, matrix, _ = matrix_of("Q4_K", 70, 256)
    for value in (float("inf"), float("nan")):
        hidden = torch.randn(3, 256).bfloat16()
        hidden[1, 100] = value
        found = linear(hidden, packed, None, matrix, int8)
        assert found.isfinite().all(-1).tolist() == [True, False, True]
        assert not found[1].isfinite().any()


@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 3, 256), (0, 256), (2, 0, 256)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    packed, matrix, weight = matrix_of("Q4_K", 70, 256)
    hidden = torch.randn(*shape)
    torch.testing.assert_close(
        linear(hidden, packed, None, matrix), hidden @ weight.T, rtol=1e-4, atol=1e-3
    )
    turned = torch.randn(256, 4).T
    torch.testing.assert_close(
        linear(turned, packed, None, matrix), turned @ weight.T, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=share(0.25))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_bits_are_read(kind: str, seed: int) -> None:
    """Blocks of any bytes, whose scales are any numbers, give what the package reads of them."""
    drawn = torch.Generator().manual_seed(seed)
    form = BLOCKS[kind]
    matrix = Matrix(kind, 5, 2 * form.inputs)
    blocks = torch.randint(0, 256, (5, 2 * form.stored), dtype=torch.uint8, generator=drawn)
    wanted = weights(blocks.numpy(), Type[kind])
    if wanted.isfinite().all():
        found = rows(torch.arange(5), pack(blocks, matrix), matrix, torch.float32)
        # The difference of two products is as exact as these are.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-2)
    else:
        with pytest.raises(ExecutionError, match="a scale that is no finite number"):
            pack(blocks, matrix)


def layer_of(kind: str = "Q4_0", bias: bool = True) -> GgufLinear:
    added = torch.nn.Parameter(torch.randn(70).bfloat16(), requires_grad=False) if bias else None
    layer = GgufLinear(Matrix(kind, 70, 256), added)
    layer.set_blocks(torch.from_numpy(random_blocks(Type[kind], 70, 256, 0.1)))
    return layer


def test_layers() -> None:
    layer, hidden = layer_of(), torch.randn(3, 256).bfloat16()
    again = copy.deepcopy(layer)
    assert again.weight.data_ptr() != layer.weight.data_ptr()
    assert torch.equal(again(hidden), layer(hidden))
    other = layer_of()
    other.set_blocks(torch.from_numpy(random_blocks(Type.Q4_0, 70, 256, seed=9)))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(hidden), layer(hidden))
    assert str(layer) == "GgufLinear(in_features=256, out_features=70, blocks=Q4_0)"
    embedding = GgufEmbedding(Matrix("Q4_0", 70, 256), torch.bfloat16, 16.0)
    embedding.weight = layer.weight  # as tied ones are
    plain = linear(torch.eye(256), layer.weight, None, layer.matrix).T[[5, 69]].bfloat16()
    assert torch.equal(embedding(torch.tensor([5, 69])), plain * 16)
    embedding = GgufEmbedding(Matrix("Q4_0", 70, 256), torch.bfloat16, 640**0.5)
    embedding.weight = layer.weight
    scale = torch.tensor(640**0.5, dtype=torch.bfloat16)  # as Gemma's own layer rounds it
    assert torch.equal(embedding(torch.tensor([5, 69])), plain * scale)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (torch.ones(2, 256, dtype=torch.float16), "takes bfloat16 or float32"),
        (torch.ones(2, 255), "takes bfloat16 or float32"),
        (torch.ones(2, 256, requires_grad=True), "computes no gradients"),
        (torch.ones(2, 256, dtype=torch.float32), "a bias like it"),
        (torch.ones(2, 200, device="meta"), "has 256 inputs, not 200"),
    ],
)
def test_what_a_layer_cannot_read_is_refused(hidden: torch.Tensor, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        layer_of()(hidden)


def test_layers_without_weights() -> None:
    empty = GgufLinear(Matrix("Q4_0", 70, 256), None)
    assert empty(torch.ones(2, 256, device="meta")).shape == (2, 70)
    with pytest.raises(ExecutionError, match="has no weights yet"):
        empty(torch.ones(2, 256))
    with pytest.raises(ExecutionError, match=r"uint8 \[70, 144\]"):
        empty.set_blocks(torch.zeros(70, 143, dtype=torch.uint8))
    with pytest.raises(ExecutionError, match="bfloat16 or float32, not"):
        layer_of().half()
    embedding = GgufEmbedding(Matrix("Q4_0", 70, 256), torch.bfloat16, None)
    assert embedding(torch.ones(2, dtype=torch.long, device="meta")).shape == (2, 256)
    with pytest.raises(ExecutionError, match="its weights and its ids on the CPU"):
        embedding(torch.ones(2, dtype=torch.long))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 alone has tiles")
def test_a_process_that_may_not_use_tiles(tmp_path: Path, forks: Forks) -> None:
    """Linux or a sandbox may refuse them, where the processor has them."""
    program = (
        "import test_gguf_kernel as t\n"
        "for kind in ('Q4_0', 'Q4_K', 'Q6_K'):\n"
        "    for rows in (1, 9, 50):\n"
        "        t.assert_right(kind, rows, 70, 512, t.torch.bfloat16, True)\n"
    )
    run_without_tiles(program, forks, tmp_path)


WITHOUT = ("-mno-avx512bf16", "-mno-avx512vnni", "-mno-avx512f", "-mno-avx", "-mno-avx2")


@pytest.mark.parametrize("flag", sampled(WITHOUT, 5))
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's flags")
@pytest.mark.long
def test_processors_without_its_instructions(tmp_path: Path, flag: str, forks: Forks) -> None:
    command = compiling.compiler()
    assert command is not None
    program = (
        "import sys; sys.path += sys.argv[1:]\n"
        "from sanitizing import trapping\n"
        "import test_gguf_kernel as t\n"
        "t.compiling.FLAGS = trapping('-O1')\n"
        "for kind in t.BLOCKS:\n"
        "    t.test_rows_are_what_blocks_stand_for(kind)\n"
        "    for dtype in t.DTYPES:\n"
        "        t.test_numbers_are_exact(kind, dtype)\n"
        "        for int8 in (False, True):\n"
        "            t.test_bits_depend_neither_on_the_batch_nor_on_threads(kind, dtype, int8)\n"
        "            for rows in (1, 3, 9, 50):\n"
        "                t.assert_right(kind, rows, 70, 512, dtype, True, int8)\n"
        "t.test_activations_of_8_bits()"
    )
    environ = {**os.environ, "CXX": f"{command[0]} {flag}", "XDG_CACHE_HOME": str(tmp_path)}
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "conformance")]
    done = forks.python("-c", program, *folders, env=environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtypes", [(one, one) for one in DTYPES] + [DTYPES], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 49, 130, 133])
@pytest.mark.parametrize("kinds", [OFTEN, pytest.param(tuple(BLOCKS), marks=pytest.mark.long)])
def test_products_run_together_give_the_same_bits(
    kinds: tuple[str, ...], dtypes: tuple[torch.dtype, ...], count: int, int8: bool
) -> None:
    """Of one kind, each in a call of its own: of one value and of another one."""
    torch.set_num_threads(2)
    inputs = [torch.randn(count, 512).to(dtype) for dtype in dtypes]
    calls, outs, dues = [], [], []
    for at, kind in enumerate(kind for kind in kinds for _ in range(3)):
        packed, matrix, _ = matrix_of(kind, 70 + 300 * (at % 2), 512, seed=at)
        hidden = inputs[at % 3 == 2]
        dues.append(linear(hidden, packed, None, matrix, int8))
        outs.append(torch.full_like(dues[-1], 77))
        call = native_linear(outs[-1], hidden, packed, None, *matrix, int8)
        assert call is not None
        calls.append(Done(kind, call, sibling=at > 0))
    whole = joined(calls)
    assert [done.name for done in whole] == list(kinds)
    stretch_of([(done.name, done.call) for done in whole])()
    assert all(map(torch.equal, outs, dues))

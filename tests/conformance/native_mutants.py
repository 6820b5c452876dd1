"""Tensors that a kernel cannot read, or can: every argument of every kernel, spoilt one at a time.

Run as a program it prints a line before a mutant is tried and one after,
since a kernel that reads a wrong address ends the process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from packed import layer_of, queries_of, reference, step_of
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from jackfield.contracts import PackedLayer
from jackfield.errors import ExecutionError

Tensors = dict[str, torch.Tensor]
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A call that reads memory: its name in errors, its arguments, and what it should answer."""

    kernel: str
    tensors: Tensors
    call: Callable[[Tensors], torch.Tensor]
    expected: Callable[[Tensors], torch.Tensor]


def padded(masked: bool) -> Entry:
    from jackfield_plugins.attention.cpu_decode.call import Kernel

    kernel = Kernel()
    tensors = {
        "query": torch.randn(3, 4, 1, 16), "key": torch.randn(3, 2, 40, 16),
        "value": torch.randn(3, 2, 40, 24),
    }  # fmt: skip
    if masked:
        tensors["mask"] = torch.rand(3, 1, 1, 40) > 0.3

    def expected(t: Tensors) -> torch.Tensor:
        query, key, value = (t[name].double() for name in ("query", "key", "value"))
        found = scaled_dot_product_attention(query, key, value, t.get("mask"), enable_gqa=True)
        return found.nan_to_num().transpose(1, 2)

    return Entry(
        "cpu_decode",
        tensors,
        lambda t: kernel.padded(t["query"], t["key"], t["value"], t.get("mask")),
        expected,
    )


def packed(sizes: list[tuple[int, int]], window: int | None, prompts: bool = False) -> Entry:
    from jackfield_plugins.attention.cpu_decode.call import Kernel
    from jackfield_plugins.attention.cpu_decode.prompts import Prompts

    kernel, reader, step = Kernel(), Prompts(), step_of(sizes)
    layer = layer_of(step, kv_heads=2, head_dim=16, window=window, dtype=torch.float32, stale=0)
    tables = layer.tables
    layer_shape = (step.spans[-1].query_start + step.spans[-1].query_len, 4, 16)

    def call(t: Tensors) -> torch.Tensor:
        spoilt = replace(step, cu_seqlens_q=t["starts"], seq_lens=t["lengths"])
        held = replace(tables, step=spoilt, block_table=t["table"], first=t["first"])
        pools = PackedLayer(layer.keys, layer.values, held)
        pools.keys, pools.values = t["keys"], t["values"]  # torch would refuse to flatten some
        if not prompts:
            return kernel.packed(t["query"], pools)
        out = torch.zeros(layer_shape, dtype=t["query"].dtype)
        reader.attend(t["query"], pools, out)
        return out

    def expected(t: Tensors) -> torch.Tensor:
        held = replace(tables, tables=t["table"].tolist())
        pools = PackedLayer(t["keys"], t["values"], held)
        return reference(t["query"], pools, scaling=0.25)

    tensors = {
        "query": queries_of(step, 4, layer), "keys": layer.keys, "values": layer.values,
        "table": tables.block_table, "first": tables.first, "lengths": step.seq_lens,
        "starts": step.cu_seqlens_q,
    }  # fmt: skip
    return Entry("cpu_decode", tensors, call, expected)


def rms_norm(dtype: torch.dtype) -> Entry:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from jackfield_plugins.kernel.cpu_rms_norm.call import rms_norm_of

    layer = LlamaRMSNorm(48).to(dtype)
    torch.nn.init.uniform_(layer.weight)
    forward = rms_norm_of(layer)

    def call(t: Tensors) -> torch.Tensor:
        layer._parameters["weight"] = t["weight"]
        return forward(t["hidden_states"])

    def expected(t: Tensors) -> torch.Tensor:
        layer._parameters["weight"] = t["weight"]
        return LlamaRMSNorm.forward(layer, t["hidden_states"])

    rows = torch.randn(2, 5, 48, dtype=dtype)
    return Entry(
        "cpu-rms-norm", {"hidden_states": rows, "weight": layer.weight.data}, call, expected
    )


def groupwise(bits: int, through_torch: bool = False, dtype: torch.dtype = torch.bfloat16) -> Entry:
    from jackfield_plugins.quantizer.groupwise.native import NativeProduct
    from jackfield_plugins.quantizer.groupwise.operator import groupwise_linear
    from jackfield_plugins.quantizer.groupwise.quantize import Quantized, dequantize, quantize

    product, sizes = NativeProduct(), (64, 70, 32, bits)
    stored = product.pack(quantize(torch.randn(70, 64), bits=bits, group_size=32), bits)

    def call(t: Tensors) -> torch.Tensor:
        if through_torch:
            return groupwise_linear(*t.values(), "native", *sizes)
        return product.linear(t["hidden"], (t["qweight"], t["scales"]), t["bias"], sizes)

    def expected(t: Tensors) -> torch.Tensor:
        given = (t[name].reshape(getattr(stored, name).shape) for name in ("qweight", "scales"))
        weight = dequantize(product.unpack(Quantized(*given), 70, bits), bits=bits)
        found = t["hidden"].double() @ weight.double().T + t["bias"].double()
        return found.to(dtype)

    tensors = {
        "hidden": torch.randn(2, 3, 64).to(dtype), "qweight": stored.qweight,
        "scales": stored.scales, "bias": torch.randn(70).to(dtype),
    }  # fmt: skip
    return Entry(f"int{bits}-cpu", tensors, call, expected)


def gguf_linear(kind: str, through_torch: bool) -> Entry:
    from gguf_files import Type, random_blocks

    from jackfield_plugins.quantizer.gguf import native
    from jackfield_plugins.quantizer.gguf.operator import gguf_linear as operator

    matrix = native.Matrix(kind, 70, 256)
    packed = native.pack(torch.from_numpy(random_blocks(Type[kind], 70, 256, 0.1)), matrix)

    def call(t: Tensors) -> torch.Tensor:
        if through_torch:
            return operator(*t.values(), *matrix, False)
        return native.linear(*t.values(), matrix)

    def expected(t: Tensors) -> torch.Tensor:
        given = t["packed"].reshape(packed.shape)
        weight = native.rows(torch.arange(70), given, matrix, torch.float32)
        found = t["hidden"].double() @ weight.double().T + t["bias"].double()
        return found.to(t["hidden"].dtype)

    tensors = {
        "hidden": torch.randn(2, 3, 256).bfloat16(), "packed": packed,
        "bias": torch.randn(70).bfloat16(),
    }  # fmt: skip
    return Entry("gguf", tensors, call, expected)


def gguf_rows(through_torch: bool) -> Entry:
    from gguf_files import Type, random_blocks

    from jackfield_plugins.quantizer.gguf import native
    from jackfield_plugins.quantizer.gguf.operator import gguf_rows as operator

    matrix = native.Matrix("Q4_0", 70, 64)
    packed = native.pack(torch.from_numpy(random_blocks(Type.Q4_0, 70, 64, 0.1)), matrix)

    def call(t: Tensors) -> torch.Tensor:
        if through_torch:
            return operator(*t.values(), *matrix, torch.float32)
        return native.rows(*t.values(), matrix, torch.float32)

    def expected(t: Tensors) -> torch.Tensor:
        given = t["packed"].reshape(packed.shape)
        return native.linear(torch.eye(64), given, None, matrix).T[t["index"].long()]

    tensors = {"index": torch.tensor([[3, 69, 0], [3, 5, 64]]), "packed": packed}
    return Entry("gguf", tensors, call, expected)


def gguf_blocks() -> Entry:
    from gguf_files import Type, random_blocks, weights

    from jackfield_plugins.quantizer.gguf import native

    matrix = native.Matrix("Q6_K", 70, 256)

    def call(t: Tensors) -> torch.Tensor:
        packed = native.pack(t["blocks"], matrix)
        return native.rows(torch.arange(70), packed, matrix, torch.float32)

    # No byte that a scale which is no number could begin with, wherever a mutant puts it.
    tensors = {"blocks": torch.from_numpy(random_blocks(Type.Q6_K, 70, 256, 0.1)) & 63}
    return Entry(
        "gguf", tensors, call, lambda t: weights(t["blocks"].contiguous().numpy(), Type.Q6_K)
    )


ENTRIES: dict[str, Callable[[], Entry]] = {
    "padded": lambda: padded(masked=False),
    "padded, masked": lambda: padded(masked=True),
    "packed, one query": lambda: packed([(1, 40), (1, 3), (1, 17)], None),
    "packed, a window": lambda: packed([(1, 40), (1, 3), (1, 70)], 20),
    "packed, drafts": lambda: packed([(3, 40), (1, 9), (4, 17)], None),
    "prompts": lambda: packed([(3, 40), (20, 20), (2, 17)], None, prompts=True),
    "prompts, a window": lambda: packed([(1, 40), (40, 70)], 20, prompts=True),
    "rms norm float32": lambda: rms_norm(torch.float32),
    "rms norm bfloat16": lambda: rms_norm(torch.bfloat16),
    "int4": lambda: groupwise(4),
    "int8": lambda: groupwise(8),
    "int8, float32": lambda: groupwise(8, dtype=torch.float32),
    "int4, operator": lambda: groupwise(4, through_torch=True),
    "gguf Q4_K": lambda: gguf_linear("Q4_K", through_torch=False),
    "gguf Q6_K, operator": lambda: gguf_linear("Q6_K", through_torch=True),
    "gguf rows": lambda: gguf_rows(through_torch=False),
    "gguf rows, operator": lambda: gguf_rows(through_torch=True),
    "gguf blocks": gguf_blocks,
}


def alike(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same numbers, elsewhere or otherwise laid out: these are right, or refused."""
    yield "as it is", tensor
    yield (
        "within another",
        torch.cat([tensor.flatten()] * 3)[tensor.numel() :][: tensor.numel()].view(tensor.shape),
    )
    for axis in range(tensor.dim()):
        yield (
            f"every second of axis {axis}",
            tensor.repeat_interleave(2, axis).unfold(axis, 1, 2).squeeze(-1),
        )
        yield f"axis {axis} lies last", tensor.movedim(axis, -1).contiguous().movedim(-1, axis)
    yield "sparse", tensor.to_sparse()


def other(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Other numbers, or none."""
    yield "meta", tensor.to("meta")
    with FakeTensorMode() as mode:
        yield "fake", mode.from_tensor(tensor)
    for dtype in DTYPES:
        if dtype is not tensor.dtype:
            yield str(dtype), tensor.to(dtype)
    for axis in range(tensor.dim()):
        size = tensor.shape[axis]
        yield f"axis {axis} shorter", tensor.narrow(axis, 0, size - 1).contiguous()
        yield f"axis {axis} longer", torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
        yield f"axis {axis} empty", tensor.narrow(axis, 0, 0).contiguous()
        yield f"axis {axis} of one", tensor.narrow(axis, 0, 1).contiguous()
        yield f"axis {axis} repeats", tensor.narrow(axis, 0, 1).expand(tensor.shape)
        yield f"axis {axis} is gone", tensor.select(axis, 0).contiguous()
        for beside in range(axis):
            yield f"axes {beside} and {axis} swapped", tensor.transpose(beside, axis)
    yield "another axis", tensor[None]
    yield "a number", tensor.flatten()[0]
    yield "nothing", tensor.new_empty(0)
    freed = tensor.clone(memory_format=torch.contiguous_format)
    freed.untyped_storage().resize_(0)
    yield "freed", freed
    if tensor.dtype is torch.int32:
        for number in (-1, 2**30, -(2**31), 2**31 - 1):
            yield f"all {number}", torch.full_like(tensor, number)
            last = tensor.clone()
            last.flatten()[-1] = number
            yield f"the last is {number}", last


def strange(tensor: torch.Tensor) -> bool:
    """Whether torch itself fails over many a view of it."""
    if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
        return True
    return tensor.is_cpu and tensor.untyped_storage().nbytes() < tensor.nbytes


def outcome(entry: Entry, name: str, mutant: torch.Tensor) -> str:
    """`right`, `refused by name`, or `refused by torch` where it is strange; else `wrong: …`."""
    tensors = entry.tensors | {name: mutant}
    try:
        found = entry.call(tensors)
    except ExecutionError as error:
        line = str(error)
        named = line.startswith(entry.kernel) and "\n" not in line and line.isprintable()
        return "refused by name" if named else f"wrong: {line}"
    except Exception as error:  # noqa: BLE001 - any line will do
        kind = "refused by torch" if strange(mutant) else "wrong"  # torch says what it is
        return f"{kind}: {type(error).__name__}: {error}"
    if found.is_meta:
        return "refused by name" if mutant.is_meta else "wrong: meta"
    if not found.numel():
        return "right"
    expected = entry.expected(tensors)
    if found.shape != expected.shape:
        return f"wrong: {list(found.shape)}, not {list(expected.shape)}"
    near = torch.allclose(found.double(), expected.double(), rtol=2e-2, atol=2e-2)
    return "right" if near else "wrong: other numbers"


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for title, make in ENTRIES.items():
        entry = make()
        for name, tensor in entry.tensors.items():
            for kind, mutants in (("alike", alike(tensor)), ("other", other(tensor))):
                for what, mutant in mutants:
                    say([title, kind, name, what])
                    say(outcome(entry, name, mutant))


if __name__ == "__main__":
    main()

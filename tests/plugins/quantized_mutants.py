"""Checkpoints of quantizers, damaged one place at a time, and what becomes of each.

    python tests/plugins/quantized_mutants.py [SELECTION…] [--all | --some NUMBER]

A mutant is *caught* (an error of ours, before the first step, on one line, that blames no
plugin), or *harmless* (the same logits as plain transformers computes from the same files).
Anything else is *wrong*. `--all` damages the tensors of every layer, and not of one only; `--some`
takes so many of the mutants, evenly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, JackfieldError
from jackfield_plugins.quantizer.gptq import CPU_KERNEL

SELECTIONS = (
    "bnb-4bit",
    "bnb-4bit?double_quantization=true",
    "bnb-8bit",
    "torchao",
    "torchao?group_size=32",
    "int4-cpu",
    "int4-cpu?head=8",
    "int8-cpu",
    "gptq?samples=2",
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
ODD: tuple[Any, ...] = (
    None, "4", "x", 0, -5, 3, 1.5, True, [], ["x"], {}, {"bits": [1]}, 10**12,
    "\x1b[31m\n" + "y" * 500,
)  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int32, torch.uint8)

Tensors = dict[str, torch.Tensor]


class Mutant(NamedTuple):
    """What is done to a copy of a checkpoint."""

    label: str
    apply: Callable[[Path], None]


class Outcome(NamedTuple):
    label: str
    kind: str  # "caught", "harmless" or "wrong"
    said: str


def save(selection: str, folder: Path, dtype: str = "bfloat16") -> Path:
    """A tiny checkpoint of `selection`, made in `folder`."""
    base, made = folder / "base", folder / "quantized"
    if not base.is_dir():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=2048, max_position_embeddings=64,
            initializer_range=0.3, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(base)
    shutil.rmtree(made, ignore_errors=True)
    more = {"tokenizer": AutoTokenizer.from_pretrained(MODEL_PATH)} if "gptq" in selection else {}
    with jackfield.load(base, quantization=selection, dtype=dtype, **more) as engine:
        engine.model.save_pretrained(made)
    return made


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Do something to the tensors of a copy, and leave the metadata as they are."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata)


def _of_shape(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    flat = tensor.reshape(-1)
    if tensor.dim():
        yield "shorter", tensor[:-1]
        yield "longer", torch.cat([tensor, tensor[:1]])
        yield "of one row", tensor[:1]
        yield "of zero size", tensor[:0]
        yield "half", tensor[: len(tensor) // 2]
    if tensor.dim() == 2:
        yield "transposed", tensor.T
        yield "a column less", tensor[:, :-1]
    yield "of another rank", tensor[None]
    yield "flat", flat
    yield "missing", None


def _of_values(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    for dtype in DTYPES:
        if dtype is not tensor.dtype:
            yield f"as {dtype}", tensor.to(dtype)
    if tensor.is_floating_point():
        values = [("NaN", float("nan")), ("infinite", float("inf")), ("huge", 1e38), ("zero", 0.0)]
    else:
        values = [("most", torch.iinfo(tensor.dtype).max), ("least", torch.iinfo(tensor.dtype).min)]
    for word, value in values:
        changed = tensor.clone()
        changed.view(-1)[:1] = value
        yield f"with a value that is {word}", changed


def of_tensors(folder: Path, *, everything: bool = False) -> Iterator[Mutant]:
    tensors = load_file(folder / "model.safetensors")
    some = ("layers.0.self_attn.k_proj", "embed_tokens", "lm_head", "model.norm")
    for name, tensor in tensors.items():
        if not everything and not any(part in name for part in some):
            continue
        for word, changed in (*_of_shape(tensor), *_of_values(tensor)):
            yield Mutant(f"{name} {word}", _replaced(name, changed))
        yield Mutant(f"{name}_more is there too", _replaced(f"{name}_more", tensor))


def _replaced(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return lambda folder: rewrite(folder, change)


def of_states(folder: Path) -> Iterator[Mutant]:
    """The text beside a layer of bitsandbytes in 4 bits."""
    tensors = load_file(folder / "model.safetensors")
    name = next((n for n in tensors if "k_proj.weight.quant_state" in n), None)
    if name is None:
        return
    told = json.loads(tensors[name].numpy().tobytes())
    for key in told:
        for value in (*ODD, [64, 32], [32], 128, 256, "float16", "fp4", float("nan"), float("inf")):
            yield Mutant(f"{name}: {key}={value!r}", _replaced(name, _text({**told, key: value})))
        rest = {k: v for k, v in told.items() if k != key}
        yield Mutant(f"{name} without {key}", _replaced(name, _text(rest)))
    for text in (b"", b"{", b"[" * 100_000, b"[]", b"null", b"\xff\xfe", b'{"shape": 1e999}'):
        data = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
        yield Mutant(f"{name} is {text[:20]!r}", _replaced(name, data))


def _text(told: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)


def of_metadata(folder: Path) -> Iterator[Mutant]:
    """What the files of torchao say of their tensors."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    name = next((n for n in metadata if n.endswith("0.self_attn.k_proj.weight")), None)
    if name is None:
        return
    told = json.loads(metadata[name])
    for key in told:
        for value in ODD:
            yield _with_metadata(
                f"{name}: {key}={value!r}", {name: json.dumps({**told, key: value})}
            )
    for key in told["_data"]:
        for value in (*ODD, [1, 16], [32, 64], [0, 64], {"_type": "torch.dtype", "_data": "int8"}):
            data = {**told, "_data": {**told["_data"], key: value}}
            yield _with_metadata(f"{name}: _data.{key}={value!r}", {name: json.dumps(data)})
    for key in ("tensor_names", name):
        for text in ("", "[]", "{", "[" * 100_000, '["a"]', '{"_type": "os.system"}', "null"):
            yield _with_metadata(f"{key} is {text[:20]!r}", {key: text})


def _with_metadata(label: str, changes: dict[str, str]) -> Mutant:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file(load_file(file), file, {**metadata, **changes})

    return Mutant(label, apply)


def of_groups(folder: Path) -> Iterator[Mutant]:
    """Groups that columns of GPTQ are in."""
    for name, groups in load_file(folder / "model.safetensors").items():
        if name.endswith("0.self_attn.k_proj.g_idx"):
            last = int(groups.max())
            for word, changed in (
                ("one behind the last", groups.clone().fill_(last + 1)),
                ("below zero", groups - last - 1),
                ("all the first", torch.zeros_like(groups)),
                ("backwards", groups.flip(0)),
            ):
                yield Mutant(f"{name} {word}", _replaced(name, changed))


def of_config(folder: Path) -> Iterator[Mutant]:
    """Every field of the quantization config, and of what is nested in it, with odd values."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for path in _fields(config):
        for value in ODD:
            yield Mutant(f"config {'.'.join(path)}={str(value)[:20]!r}", _edited(path, value))
        yield Mutant(f"config without {'.'.join(path)}", _edited(path, _edited))
    for value in (*ODD, {"quant_method": "none-such"}, {"quant_method": 5}):
        if value is not None:
            yield Mutant(f"config is {str(value)[:20]!r}", _edited((), value))


def _fields(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from _fields(value, (*at, key))


def _edited(path: tuple[str, ...], value: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        where, keys = config, ("quantization_config", *path)
        for key in keys[:-1]:
            where = where[key]
        if value is _edited:
            del where[keys[-1]]
        else:
            where[keys[-1]] = value
        file.write_text(json.dumps(config))

    return apply


def mutants(folder: Path, *, everything: bool = False) -> Iterator[Mutant]:
    yield from of_tensors(folder, everything=everything)
    yield from of_states(folder)
    yield from of_metadata(folder)
    yield from of_groups(folder)
    yield from of_config(folder)


def outcome(mutant: Mutant, whole: Path, copy: Path) -> Outcome:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    mutant.apply(copy)
    try:
        with jackfield.load(copy, dtype="bfloat16", cache_implementation="dynamic") as engine:
            ours = logits_of(engine.model)
    except JackfieldError as error:
        said = str(error)
        clean = said.isprintable() and not any(w in said for w in ("its own", "Traceback"))
        right = clean and isinstance(error, CheckpointError)
        return Outcome(
            mutant.label, "caught" if right else "wrong", f"{type(error).__name__}: {said}"
        )
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return Outcome(mutant.label, "wrong", f"{type(error).__name__}: {error}")
    try:
        theirs = logits_of(plain(copy))
    except Exception as error:  # noqa: BLE001
        return Outcome(mutant.label, "wrong", f"runs, where transformers fails: {error}")
    same = torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return Outcome(mutant.label, "harmless" if same else "wrong", "" if same else "other logits")


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(IDS).logits  # type: ignore[no-any-return]


def plain(folder: Path) -> Any:
    """The model as transformers reads it by itself."""
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    more: dict[str, Any] = {}
    if stored.get("quant_method") == "gptq":  # the kernel that is named here, too
        more["quantization_config"] = GPTQConfig(bits=stored["bits"], backend=CPU_KERNEL)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", **more
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes would repack layers in the first step, and round scales to bfloat16
            module.support_avx512bf16_for_cpu = False
    return model.eval()


class UnusableError(Exception):
    """There is nothing to compare with on this machine."""


def sweep(selection: str, *, everything: bool = False, some: int | None) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as made:
        whole = save(selection, Path(made))
        try:
            logits_of(plain(whole))
        except Exception as error:
            raise UnusableError(f"plain transformers does not run it undamaged: {error}") from error
        every = list(mutants(whole, everything=everything))
        for mutant in every[:: max(1, len(every) // (some or len(every)))]:
            sys.stderr.write(f"{mutant.label[:200]}\n")  # the last one, if it crashes
            yield outcome(mutant, whole, Path(made) / "mutant")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("selections", nargs="*", default=SELECTIONS)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--some", type=int)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for selection in given.selections:
        found = Counter[str]()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                for one in sweep(selection, everything=given.all, some=given.some):
                    found[one.kind] += 1
                    if one.kind == "wrong":
                        said = f"WRONG {selection}: {one.label[:150]}: {one.said[:300]!r}"
                        sys.__stdout__.write(said + "\n")
            except UnusableError as reason:
                sys.__stdout__.write(f"UNUSABLE {selection}: {reason}\n")
                continue
        counts = " | ".join(str(found[kind]) for kind in ("caught", "harmless", "wrong"))
        sys.stdout.write(f"| `{selection}` | {found.total()} | {counts} |\n")


if __name__ == "__main__":
    main()

"""LoRA adapters that are computed beside the layers of a model, whatever these layers are.

A layer's output gains ``scaling * B(A(x))`` (Hu et al., 2021, https://arxiv.org/abs/2106.09685):
only what goes in and comes out is touched, so weights may be stored in any way, and rows of one
batch may have different adapters, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jackfield.bridge.adapter import Adapter
from jackfield.bridge.adapter_files import WEIGHTS, read_config
from jackfield.bridge.adapters import NAME, PREFIX, FoundAdapter, adapted_layers, find_adapter
from jackfield.bridge.headers import safetensors_header
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.probe import TOKENS, probe
from jackfield.contracts.requirements import Weight
from jackfield.errors import CheckpointError, UsageError, quoted, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Fields of a LoRA's adapter_config.json that change more than a layer's output -> what they do.
_CHANGES_MORE = {
    "use_dora": "is DoRA, which needs the weights themselves",
    "modules_to_save": "brings whole modules in place of the model's",
    "trainable_token_indices": "brings rows of the embedding",
    "target_parameters": "changes weights that belong to no layer of their own",
    "lora_bias": "adds biases",
}


class Target(NamedTuple):
    """One layer that a LoRA changes: its matrices' names in the file, and their factor."""

    a: str
    b: str
    scaling: float


class Matrices(NamedTuple):
    """A LoRA's part of one layer.

    Attributes:
        a: `[rank, inputs]`.
        b: `[rank, outputs]`, transposed and scaled.
    """

    a: torch.Tensor
    b: torch.Tensor

    def to(self, device: torch.device) -> Matrices:
        return Matrices(self.a.to(device), self.b.to(device))


NO_SLOT = -1  # that of a token which no adapter changes


class HeldLora:
    """A LoRA whose matrices are there, while somebody asks for it by name or runs with it.

    `number` is its own among all that were ever there, `slot` its place in the layers now, `parts`
    its matrices by layer, `steps` how many ran with it.
    """

    def __init__(self, number: int, adapter: Adapter, parts: dict[str, Matrices]) -> None:
        self.number = number
        self.adapter = adapter
        self.parts = parts
        self.slot = NO_SLOT
        self.steps = 0


@dataclass(frozen=True)
class FoundLora:
    """A LoRA whose files were checked against a model; nothing of it was read.

    `targets` are its layers by their names in the model, `weights` what it adds to them.
    """

    folder: Path
    adapter: Adapter
    targets: Mapping[str, Target] = field(repr=False)
    weights: tuple[Weight, ...] = field(repr=False)


def _more(found: FoundAdapter) -> str | None:
    """Why an adapter is more than a LoRA beside layers; None: it is not."""
    config = read_config(found.folder)
    if config["peft_type"] != "LORA":
        return f"is of type {config['peft_type']}"
    if found.adapter.biases:
        return "brings biases (bias)"
    return next((f"{does} ({name})" for name, does in _CHANGES_MORE.items() if config.get(name)),
                None)  # fmt: skip


def check_name(name: object) -> None:
    """Raise UsageError for what is no name of an adapter."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise UsageError(f"the name of an adapter is a text, not {quoted(name)}")


def find_lora(config: PreTrainedConfig, location: Any) -> FoundLora:
    """Check an adapter against the model of a config. Raises CheckpointError, UsageError."""
    meta = meta_model(config)
    return lora_of(find_adapter(location, meta), meta)


def lora_of(found: FoundAdapter, meta: PreTrainedModel) -> FoundLora:
    """A LoRA among others, from an adapter that was put on `meta`. Raises CheckpointError."""
    what = f"the adapter {found.adapter.location}"
    if why := _more(found):
        raise CheckpointError(
            f"{what} {why}, and among several only a plain LoRA is computed; give it alone, as "
            "adapter=…"
        )
    names = {id(module): name for name, module in meta.named_modules()}
    head = meta.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    stored, targets, weights = _Stored(what, found.folder / WEIGHTS), {}, []
    for layer in adapted_layers(meta):
        name = names[id(layer)]
        _check_plain(what, name, layer, head)
        a, b = (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
        keys = (stored.key(f"{name}.lora_A.weight", a), stored.key(f"{name}.lora_B.weight", b))
        targets[name] = Target(*keys, float(layer.scaling[NAME]))
        weights += [Weight(f"{name}.lora", a.numel() + b.numel())]
    stored.check_all_taken()
    _check_calls(what, meta, targets)
    return FoundLora(found.folder, found.adapter, targets, tuple(weights))


def _check_plain(what: str, name: str, layer: Any, head: Any) -> None:
    """Raise CheckpointError for a layer whose change is more than a LoRA of a linear one."""
    from peft.tuners.lora.layer import Linear

    if type(layer) is not Linear or layer.base_layer is head:
        raise CheckpointError(
            f"{what} changes {name}, a {type(layer.base_layer).__name__}, and among several "
            "only linear layers between embedding and head can be; give it alone, as adapter=…"
        )
    if (variant := getattr(layer, "lora_variant", {}).get(NAME)) is not None:
        raise CheckpointError(
            f"{what} changes {name} in a way of its own (PEFT's {type(variant).__name__}), and "
            "among several only a plain LoRA is computed; give it alone, as adapter=…"
        )


class _Stored:
    """The tensors of an adapter's file, of which each has to be one layer's, with its shape."""

    def __init__(self, what: str, file: Path) -> None:
        self._what = what
        header = safetensors_header(file)
        self._keys = {key.removeprefix(PREFIX): key for key in header}
        self._left = {key: tuple(entry["shape"]) for key, entry in header.items()}

    def key(self, name: str, takes: torch.Tensor) -> str:
        """By which name the file has the one that `takes` is read from."""
        key = self._keys.get(name, name)
        if (has := self._left.pop(key, None)) != tuple(takes.shape):
            raise CheckpointError(
                f"{self._what} lacks {name}"
                if has is None
                else f"{self._what}: {name} is {has}, and has to be {tuple(takes.shape)}"
            )
        return key

    def check_all_taken(self) -> None:
        if self._left:
            raise CheckpointError(f"{self._what} has no place for {shown(min(self._left))}")


def _check_calls(what: str, meta: PreTrainedModel, targets: Mapping[str, Target]) -> None:
    """Raise CheckpointError for a layer that is not called with the tokens of a step in order.

    Experts are not: each is called with those that were sent to it, or all of them at once.
    """
    seen: dict[str, set[tuple[int, ...] | None]] = {}

    def note(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], output: Any) -> None:
            given = tuple(args[0].shape[:-1]) if isinstance(output, torch.Tensor) else None
            seen.setdefault(name, set()).add(given)

        return hook

    for name in targets:
        layer: Any = meta.get_submodule(name)
        layer.base_layer.register_forward_hook(note(name))
    # Code that needs numbers to run shows a part of its calls; a step that is off ends in an error.
    whole = bool(probe(meta).calls)
    for name in targets:
        shapes = seen.get(name, set())
        if shapes - {(1, TOKENS), (TOKENS,)} or (whole and not shapes):
            raise CheckpointError(
                f"{what} changes {name}, which is not called with all tokens of a step, one row "
                "for each, so that requests of several adapters cannot be told apart there; give "
                "it alone, as adapter=…"
            )


def read_lora(found: FoundLora, dtype: torch.dtype) -> dict[str, Matrices]:
    """The matrices of a LoRA by layer, on the CPU. Raises CheckpointError.

    Numbers that are not finite are refused: a row of another adapter would meet them times zero.
    """
    from safetensors import SafetensorError, safe_open

    read = {}
    try:
        with safe_open(found.folder / WEIGHTS, "pt") as file:
            for name, target in found.targets.items():
                a, b = file.get_tensor(target.a), file.get_tensor(target.b)
                scaled = (b.float() if b.dtype != torch.float64 else b) * target.scaling
                read[name] = Matrices(a.to(dtype), scaled.T.to(dtype).contiguous())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {found.folder / WEIGHTS}: {error}") from error
    for name, parts in read.items():
        if not all(bool(part.isfinite().all()) for part in parts):
            raise CheckpointError(
                f"{found.folder / WEIGHTS}: the matrices for {name} have numbers that are not "
                f"finite in {str(dtype).removeprefix('torch.')}; fetch the adapter again"
            )
    return read

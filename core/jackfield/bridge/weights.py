"""Load weights and tokenizer, after making sure that the files are whole and safe."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from jackfield.bridge.footprint import stored_quantization
from jackfield.bridge.placement import check_placed, native, no_notes
from jackfield.bridge.source import ModelSource, first_line, quiet
from jackfield.choosing.placement import Placement
from jackfield.contracts import Quantization, Requirements
from jackfield.errors import CheckpointError

logger = logging.getLogger("jackfield")

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


Shape = tuple[int, ...]


def check_files(folder: Path) -> dict[str, Shape]:
    """The shape of every tensor in `folder`, from the headers of its files.

    Refuse a folder whose weights are missing, incomplete, or only in pickles.
    """
    _check_generation_config(folder / "generation_config.json")
    index = folder / "model.safetensors.index.json"
    files = _shards(index) if index.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
        raise CheckpointError(
            f"the weights in {folder} are pickles ({', '.join(pickles)}), which can run code when "
            "read; convert them to safetensors with save_pretrained in a place you trust"
            if pickles
            else f"there are no weights in {folder}: expected model.safetensors"
        )
    found: dict[str, Shape] = {}
    for file in files:
        found |= {name: tuple(entry["shape"]) for name, entry in safetensors_header(file).items()}
    return found


def _check_generation_config(file: Path) -> None:
    """transformers goes on without a broken one: defaults would be lost without a word."""
    try:
        broken = file.is_file() and not isinstance(json.loads(file.read_text()), dict)
    except ValueError:
        broken = True
    if broken:
        raise CheckpointError(f"{file} is not a JSON object; fetch it again, or delete it")


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        shards = [index.parent / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError):
        shards = []
    if not shards:
        raise CheckpointError(f"the index {index} names no shards; fetch it again")
    return shards


def safetensors_header(file: Path) -> dict[str, Any]:
    """name -> its entry ("dtype", "shape"), after comparing the size that the header promises with
    the size of the file; reads no tensor. Raises CheckpointError.
    """
    if not file.is_file():
        raise CheckpointError(f"the shard {file} is missing; fetch the model again")
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise ValueError("header longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        expected = 8 + length + max(map(_end, header.values()), default=0)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file ({first_line(error)}); fetch it again"
        ) from None
    if size != expected:
        raise CheckpointError(
            f"{file} has {size:,} bytes where its header promises {expected:,}; fetch it again"
        )
    return header  # type: ignore[no-any-return]


def _end(entry: Any) -> int:
    """Where the bytes of a tensor end. Raises ValueError, LookupError or TypeError: no tensor's."""
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or any(type(n) is not int for n in (*shape, begin, end)):
        raise ValueError("a tensor without a shape and a place")
    return int(end)


def load_model(
    source: ModelSource,
    needs: Requirements,
    where: Placement,
    quantization: Quantization,
    folder: Path | None = None,
) -> PreTrainedModel:
    """Load the weights of `source`, as `needs` have them, to their places. Raises CheckpointError.

    What lies on disk stays in the checkpoint, or is written to `folder` where transformers stores
    it in another form. A weight that the checkpoint lacks is an error, not a random number.
    """
    if source.folder is not None:
        reasons = quantization.misfits(check_files(source.folder))
        if reasons:
            raise CheckpointError(f"{source.location}: {'; '.join(reasons)}")
    stored = stored_quantization(source.config) is not None
    # A quantizer puts weights where they belong as it makes them.
    device = torch.device(where.device)
    placed = where.spread or ((stored or quantization.config is not None) and device.type != "cpu")
    try:
        with quiet(), quantization.reading(), no_notes():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.location or "",
                config=source.config,
                revision=source.revision,
                dtype=getattr(torch, needs.dtype),
                attn_implementation="eager",  # the plan plugs in what was chosen
                experts_implementation=needs.experts_implementation,
                quantization_config=quantization.config,
                device_map=native(where) if placed else None,
                offload_folder=None if folder is None else str(folder),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported, and refused below with the names
                output_loading_info=True,
            )
    except Exception as error:
        raise CheckpointError(f"cannot load {source.location}: {first_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    _check_complete(source, loaded[1])
    quantization.finish(model)
    if where.spread:
        check_placed(model, where)
    elif not placed and model.device != device:
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides nn.Module's signature
    model.eval()
    return model


def _check_complete(source: ModelSource, info: dict[str, Any]) -> None:
    mismatched = [f"{name} {tuple(theirs)}" for name, theirs, _ in info["mismatched_keys"]]
    for names, what in (
        (info["missing_keys"], "lacks"),
        (mismatched, "has the wrong shape for"),
    ):
        if names:
            raise CheckpointError(
                f"the checkpoint {source.location} {what} {_some(names)}; its config.json does not "
                "fit its weights"
            )
    if info["unexpected_keys"]:
        logger.warning(
            "the checkpoint %s has weights that %s has no place for: %s",
            source.location,
            source.config.model_type,
            _some(info["unexpected_keys"]),
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def load_tokenizer(source: ModelSource) -> Any | None:
    """The tokenizer of `source`; None for a folder without one, which serves token ids only."""
    if source.location is None:
        return None
    if source.folder and not any((source.folder / n).is_file() for n in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            source.location, revision=source.revision, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(
            f"cannot load the tokenizer of {source.location}: {first_line(error)}"
        ) from error

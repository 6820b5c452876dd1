"""Which files a checkpoint's weights are in, and what their headers promise; reads no weight.

What a config or an index says may not leave the folder. A link in the folder may: it was put there
by whoever owns the folder, as the hub's cache does it.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path, PurePosixPath
from typing import Any

from jackfield.contracts import StoredTensor
from jackfield.errors import CheckpointError, quoted, shown
from jackfield.foreign import MEBIBYTE, opened, parsed, read_json

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_NAME = 255  # bytes, of any file system
MOST = 64 * MEBIBYTE  # of a header or an index; a hundred times what the largest models have
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

#: The bits of a number of each dtype of the format.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def check_files(folder: Path, named: object = None) -> dict[str, StoredTensor]:
    """Every tensor that transformers reads from `folder`, from its files' headers.

    `named` is the file that the config names (`transformers_weights`), if it does. Refuse a folder
    whose weights are missing, incomplete, or only in pickles. Raises CheckpointError.
    """
    first = folder / named_weights(named, folder / "config.json") if named is not None else None
    if first is None:
        first = next((f for n in (WHOLE, INDEX) if os.path.lexists(f := folder / n)), None)
    if first is None:
        pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
        raise CheckpointError(
            f"the weights in {folder} are pickles ({', '.join(pickles[:3])}), which can run code "
            "when read; convert them to safetensors with save_pretrained in a place you trust"
            if pickles
            else f"there are no weights in {folder}: expected {WHOLE}"
        )
    if not first.name.endswith(".index.json"):
        return _tensors(first)
    found: dict[str, StoredTensor] = {}
    places = _weight_map(first)
    for name in shards(first):
        for tensor, stored in _tensors(folder / name).items():
            if places.get(tensor, name) != name or tensor in found:
                raise CheckpointError(
                    f"{folder / name} has {shown(tensor)}, which {first} places in another file"
                )
            found[tensor] = stored
    for tensor, name in places.items():
        if tensor not in found:
            raise CheckpointError(
                f"{first} places {shown(tensor)} in {name}, which lacks it; fetch the model again"
            )
    return found


def shards(index: Path) -> list[str]:
    """The files that an index names, sorted. Raises CheckpointError."""
    return sorted(set(_weight_map(index).values()))


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises CheckpointError."""
    places = read_json(index, MOST).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"the index {index} names no shards; fetch it again")
    checked = {value: named_weights(value, index) for value in _distinct(places, index)}
    return {tensor: checked[value] for tensor, value in places.items()}


def _distinct(places: dict[str, Any], index: Path) -> set[str]:
    for tensor, value in places.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"the index {index} places {shown(tensor)} in {shown(value)}, which is no file name"
            )
    return set(places.values())


def named_weights(name: object, origin: Path) -> str:
    """A name that `origin` gives a file of weights. Raises CheckpointError: it leaves the folder,
    is none, or is not of the one format that runs nothing.
    """
    path = PurePosixPath(str(name))
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > _NAME:
        complaint = "is no file name"
    elif path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        complaint = "may lie outside of the folder"
    elif not name.endswith((".safetensors", ".safetensors.index.json")):
        complaint = "is not a safetensors file"
    else:
        return name
    raise CheckpointError(f"{origin} names the weights {quoted(name)}, which {complaint}")


def _tensors(file: Path) -> dict[str, StoredTensor]:
    return stored(safetensors_header(file), file)


def stored(header: dict[str, Any], file: Path) -> dict[str, StoredTensor]:
    """What a header that is `laid_out` says of the tensors in `file`."""
    return {
        name: StoredTensor(str(entry.get("dtype")), tuple(entry["shape"]), file)
        for name, entry in header.items()
    }


def safetensors_header(file: Path) -> dict[str, Any]:
    """name -> its entry ("dtype", "shape"), after comparing the places that the header promises
    with each other and with the size of the file; reads no tensor. Raises CheckpointError.
    """
    if not os.path.lexists(file):
        raise CheckpointError(f"the shard {file} is missing; fetch the model again")
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        if len(start) < 8:
            raise _broken(file, _wrong(f"it has {size} bytes"))
        (length,) = struct.unpack("<Q", start)
        if length > min(size, MOST):
            raise _broken(file, _wrong(f"a header of {length:,} bytes in a file of {size:,}"))
        content = stream.read(length)
    try:
        return laid_out(parsed(content, f"the header of {file}"), 8 + length, size)
    except BrokenError as error:
        raise _broken(file, error) from None


class BrokenError(Exception):
    """What is wrong with a header, as a text that goes on after the name of its file."""


def laid_out(header: dict[str, Any], start: int, size: int) -> dict[str, Any]:
    """`header`, less its metadata, of a file of `size` bytes whose tensors begin at `start`.

    Raises BrokenError where the places of its tensors do not fit each other, or the file.
    """
    header.pop("__metadata__", None)
    expected = start
    for (begin, end), name in sorted((_place(name, header[name]), name) for name in header):
        if begin != expected - start:
            raise _wrong(f"the bytes of {shown(name)} do not begin where others end")
        expected += end - begin
    if size != expected:
        raise BrokenError(f"has {size:,} bytes where its header promises {expected:,}")
    return header


def _place(name: str, entry: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end. Raises BrokenError: it is no tensor's entry."""
    try:
        bits, shape, (begin, end) = BITS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            if math.prod(shape) * bits == (end - begin) * 8:
                return begin, end
            raise _wrong(f"{shown(name)} has other bytes than its shape and dtype need")
    except (LookupError, TypeError, ValueError):
        pass
    raise _wrong(f"{shown(name)} has no dtype, shape and place of a tensor")


def _wrong(what: str) -> BrokenError:
    return BrokenError(f"is not a safetensors file ({what})")


def _broken(file: Path, error: BrokenError) -> CheckpointError:
    return CheckpointError(f"{file} {error}; fetch it again")

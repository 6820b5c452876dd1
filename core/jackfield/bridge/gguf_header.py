"""What a GGUF file says of itself, checked against its size before anybody reads more of it.

The format is llama.cpp's: keys with values, a table of tensors, and their bytes
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.errors import CheckpointError, shown
from jackfield.foreign import opened

MAGIC = b"GGUF"  # what a file begins with

VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, where the file says nothing
_MOST_DIMENSIONS = 4

#: The struct of each value that has one size, by its number in the file.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NAME = re.compile(r"[\w-]{1,64}")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: `type` is ggml's name of how it is stored, `shape` is as torch has it.

    Its `nbytes` begin at `start` of the file `path`.
    """

    path: Path
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.type} {list(self.shape)}"


@dataclass(frozen=True)
class Array:
    """A value that is a list, which is read when somebody asks (`GgufHeader.array`)."""

    type: int
    count: int
    start: int


@dataclass(frozen=True)
class GgufHeader:
    """Keys and tensors of a file that is whole.

    Attributes:
        values: Each key's value; of a list an `Array`.
        tensors: By the names in the file, in its order.
        raw: The bytes of each key with its value, as they stand in the file: begin and end.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    raw: Mapping[str, tuple[int, int]]

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])

    def own(self, key: str) -> Any:
        """A value of the architecture's own; None where it has none."""
        return self.values.get(f"{self.architecture}.{key}")

    def array(self, key: str) -> list[Any] | None:
        """The list that a key has; None where it has none. Raises CheckpointError."""
        found = self.values.get(key)
        if not isinstance(found, Array):
            return None
        with opened(self.path) as file, _mapped(file.fileno()) as content:
            try:
                return _Cursor(content, found.start).items(found.type, found.count)
            except _BrokenError as error:
                raise CheckpointError(f"{key} of {self.path}: {error}; fetch it again") from None


class _BrokenError(Exception):
    """What is wrong, as a text that goes on after the name of the file."""


class _EndsError(_BrokenError):
    """The header goes on where the file ends."""


def has_header(path: Path) -> bool:
    """Whether the beginning of a file that is in `path` has its whole header, right or wrong."""
    with opened(path) as file, _mapped(file.fileno()) as content:
        try:
            _read(path, content)
        except _EndsError:
            return False
        except _BrokenError:
            pass
        return True


def read_header(path: Path) -> GgufHeader:
    """The header of `path`. Raises CheckpointError: no GGUF file, cut off, or with other bytes
    than its own table says; or what reads such files is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{path} is a GGUF file, and gguf is not installed: pip install 'jackfield[gguf]'"
        )
    with opened(path) as file:
        start = file.read(24)
        if start[:4] != MAGIC or len(start) < 24:
            raise CheckpointError(f"{path} is not a GGUF file; fetch it again")
        try:
            with _mapped(file.fileno()) as content:
                return _read(path, content)
        except _BrokenError as error:
            raise CheckpointError(
                f"{path} is not a whole GGUF file ({error}); fetch it again"
            ) from None


def _mapped(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def _read(path: Path, content: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(content, 4)
    (version,) = cursor.numbers("I", 1)
    if version not in VERSIONS:
        raise _BrokenError(f"version {version}, and {VERSIONS[0]} or {VERSIONS[1]} can be read")
    tensor_count, value_count = cursor.numbers("Q", 2)
    values: dict[str, Any] = {}
    raw: dict[str, tuple[int, int]] = {}
    for _ in range(value_count):
        begin, key = cursor.place, cursor.string()
        if key in values:
            raise _BrokenError(f"two values of {shown(key)}")
        values[key] = cursor.value(*cursor.numbers("I", 1))
        raw[key] = begin, cursor.place
    architecture = values.get("general.architecture")
    later = architecture is None and number_of(values, "split.no") > 0  # the first part says it
    if not later and not (isinstance(architecture, str) and _NAME.fullmatch(architecture)):
        raise _BrokenError(f"general.architecture is {shown(architecture)}")
    table = [_entry(cursor) for _ in range(tensor_count)]
    return GgufHeader(path, values, _placed(path, table, cursor.place, values, len(content)), raw)


def number_of(values: Mapping[str, Any], key: str) -> int:
    """A key's whole number; 0 where it has none."""
    found = values.get(key)
    return found if isinstance(found, int) else 0


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape in torch's order, type and offset of a tensor."""
    name = cursor.string()
    (dimensions,) = cursor.numbers("I", 1)
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise _BrokenError(f"{shown(name)} has {dimensions} dimensions")
    shape = cursor.numbers("Q", dimensions)[::-1]
    (kind,) = cursor.numbers("I", 1)
    (offset,) = cursor.numbers("Q", 1)
    return name, shape, kind, offset


def _placed(
    path: Path, table: list[tuple[str, tuple[int, ...], int, int]], end: int, values: Any, size: int
) -> dict[str, GgufTensor]:
    """The tensors, where their bytes are in the file and nobody else's."""
    alignment = values.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise _BrokenError(f"general.alignment is {shown(alignment)}")
    first, found = -(-end // alignment) * alignment, {}
    for name, shape, kind, offset in table:
        if name in found:
            raise _BrokenError(f"two tensors {shown(name)}")
        found[name] = _tensor(path, name, shape, kind, first + offset)
    after = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].start):
        if tensor.start < after or tensor.start % alignment:
            raise _BrokenError(f"the bytes of {shown(name)} do not begin where others end")
        after = tensor.start + tensor.nbytes
        if after > size:
            raise _BrokenError(f"{size:,} bytes, and {shown(name)} ends at {after:,}")
    return found


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise _BrokenError(f"{shown(name)} is of type {kind}, which nobody here knows") from None
    numbers, size = GGML_QUANT_SIZES[known]
    if math.prod(shape) > 1 << 50 or not all(shape) or shape[-1] % numbers:
        raise _BrokenError(f"{shown(name)} has {list(shape)} numbers in blocks of {numbers}")
    return GgufTensor(path, known.name, shape, start, math.prod(shape) // numbers * size)


class _Cursor:
    """Reads a file from a place on; whatever would lie beyond its end is a _BrokenError."""

    def __init__(self, content: mmap.mmap, place: int) -> None:
        self._content, self.place = content, place

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        begin = self._skip(struct.calcsize(f"<{code}") * count)
        return struct.unpack_from(f"<{count}{code}", self._content, begin)

    def string(self) -> str:
        (length,) = self.numbers("Q", 1)
        begin = self._skip(length)
        try:
            return self._content[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise _BrokenError(f"a text at byte {begin:,} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _FIXED:
            return self.numbers(_FIXED[kind], 1)[0]
        if kind != _ARRAY:
            raise _BrokenError(f"a value of type {kind} before byte {self.place:,}")
        (of,) = self.numbers("I", 1)
        (count,) = self.numbers("Q", 1)
        found = Array(of, count, self.place)
        if of in _FIXED:
            self._skip(struct.calcsize(f"<{_FIXED[of]}") * count)
        elif of == _STRING:
            for _ in range(count):
                self._skip(*self.numbers("Q", 1))
        else:
            raise _BrokenError(f"a list of type {of} before byte {self.place:,}")
        return found

    def items(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(_FIXED[kind], count))

    def _skip(self, size: int) -> int:
        begin, self.place = self.place, self.place + size
        if self.place > len(self._content):
            raise _EndsError(f"it ends at byte {len(self._content):,}, within its header")
        return begin

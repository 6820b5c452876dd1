"""A model in several GGUF files, as llama-gguf-split cuts them: NAME-00001-of-00003.gguf and so on.

The first has all keys, each has tensors of its own and says which of how many parts it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jackfield.bridge.gguf_header import GgufHeader, GgufTensor, number_of, read_header
from jackfield.errors import CheckpointError, shown

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def parts_of(location: str) -> list[str]:
    """The names of all parts, of which a caller may name any; else the one name."""
    found = _PART.fullmatch(location)
    if found is None or not 0 < int(found[2]) <= int(found[3]):
        return [location]
    return [f"{found[1]}-{n:05}-of-{found[3]}.gguf" for n in range(1, int(found[3]) + 1)]


def header_of(paths: Sequence[Path]) -> GgufHeader:
    """The header of a file, or of all parts as if they were one. Raises CheckpointError."""
    headers = []
    for number, path in enumerate(paths):
        headers.append(read_header(path))
        _check_part(headers[-1], number, len(paths))
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise CheckpointError(
                f"{header.path} has {shown(twice)}, which is in another part too; fetch them again"
            )
        tensors |= header.tensors
    total = number_of(headers[0].values, "split.tensors.count") or len(tensors)
    if total != len(tensors):
        raise CheckpointError(
            f"the parts of {paths[0]} have {len(tensors)} tensors, and it says {total}; fetch "
            "them again"
        )
    return replace(headers[0], tensors=tensors)


def _check_part(header: GgufHeader, number: int, count: int) -> None:
    """Raise CheckpointError where a file is another part than its name and its neighbours say."""
    own, of = (number_of(header.values, f"split.{key}") for key in ("no", "count"))
    if (own, max(of, 1)) == (number, count):
        return
    if count == 1:
        raise CheckpointError(
            f"{header.path} is one of {of} parts of a file; have all of them side by side, named "
            f"NAME-00001-of-{of:05}.gguf and so on, or join them with llama-gguf-split --merge"
        )
    raise CheckpointError(
        f"{header.path} says that it is part {own + 1} of {of}, and its name that it is part "
        f"{number + 1} of {count}; fetch it again"
    )

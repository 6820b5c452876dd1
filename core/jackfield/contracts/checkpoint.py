"""The tensors in the headers of a checkpoint's files, compared with what a quantizer expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, by the file's header.

    Attributes:
        dtype: safetensors' name of it ("BF16").
        shape: Its sizes; of a matrix of a linear layer mostly out × in.
        file: Where it is.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Form:
    """What a tensor in a file has to be: of one of `dtypes`, and of `shape`."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


#: The tensors of a folder's files, by name.
Tensors = Mapping[str, StoredTensor]


def unlike(tensors: Tensors, forms: Mapping[str, Form]) -> list[str]:
    """The first of the tensors named in `forms` that is missing, or is something else."""
    for name, form in forms.items():
        found = tensors.get(name)
        if found is None:
            return [f"there is no {name}, which has to be {form}"]
        if found.dtype not in form.dtypes or found.shape != form.shape:
            return [f"{name} in {found.file.name} is {found}, and has to be {form}"]
    return []


def paths(tensors: Iterable[str], *endings: str) -> list[str]:
    """What stands before one of `endings` in the names of tensors, each once, in order."""
    found = {
        name.removesuffix(end): None for name in tensors for end in endings if name.endswith(end)
    }
    return sorted(found)


def first(reasons: Iterable[list[str]]) -> list[str]:
    """The first reasons that are any, or none; what comes after them is not computed."""
    return next((found for found in reasons if found), [])


@dataclass(frozen=True)
class Field:
    """A field of a checkpoint's quantization config: which values can be.

    Attributes:
        allows: `allows(value)` says whether a value can be; it must stand any value.
        words: What can be, as an error says it after "has to be".
        needed: Whether the field has to be there.
    """

    allows: Callable[[Any], bool]
    words: str
    needed: bool = False


def one_of(*values: Any, needed: bool = False) -> Field:
    """Exactly one of these; ``True`` is not 1."""
    return Field(
        lambda given: any(type(given) is type(value) and given == value for value in values),
        " or ".join(map(repr, values)),
        needed,
    )


FLAG = one_of(True, False)
NAMES = Field(
    lambda given: (
        given is None or (isinstance(given, list) and all(isinstance(n, str) for n in given))
    ),
    "a list of names",
)


def odd_fields(stored: Mapping[str, Any], fields: Mapping[str, Field]) -> list[str]:
    """Each field of `stored` that has a value which `fields` does not allow, or is lacking."""
    return [
        f"{name} is {shown(stored[name]) if name in stored else 'not there'}, and has to be "
        f"{field.words}"
        for name, field in fields.items()
        if (not field.allows(stored[name]) if name in stored else field.needed)
    ]


def shown(value: Any) -> str:
    """A value out of a file, in one short line without control characters."""
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."

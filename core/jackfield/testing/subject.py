"""What is checked: one backend with its options, and where."""

from __future__ import annotations

import atexit
import contextlib
import random
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jackfield.contracts import Backend
from jackfield.errors import SelectionError
from jackfield.hookspecs import HOOKS
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield.spelling import Selection, parse

#: The distribution of a backend that is checked as an object, without being installed.
UNINSTALLED = "under-test"


def _temporary() -> Path:
    """A folder that is gone when the process ends."""
    folder = tempfile.mkdtemp(prefix="jackfield-check-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@dataclass(frozen=True)
class Subject:
    """A backend under test.

    Attributes:
        registered: The backend, and whose it is.
        options: An instance of its own options.
        selection: What selects it in `jackfield.load`: ``plugin:distribution/name?option=value``.
        folder: For files of the checks; empty. By default a temporary one.
        seed: All random numbers of the checks come from it.
        device: A torch device type.
    """

    registered: Registered
    options: Any
    selection: str
    folder: Path = field(default_factory=_temporary)
    seed: int = 0
    device: str = "cpu"

    @property
    def kind(self) -> str:
        return self.registered.kind

    @property
    def backend(self) -> Any:
        return self.registered.backend

    @property
    def wants_draft_model(self) -> bool:
        """Whether it is a decoding that drafts with an `assistant_model`."""
        assists = self.kind == "decoding" and self.backend.capabilities.assistant
        return assists and self.backend.early_exit(self.options) is None

    def random(self, name: str) -> random.Random:
        """Random numbers of their own for the check of that name."""
        return random.Random(self.seed ^ zlib.crc32(name.encode()))


def subject_of(
    selection: str,
    kind: str | None = None,
    folder: Path | None = None,
    seed: int = 0,
    device: str = "",
) -> Subject:
    """The installed backend that `selection` names.

    Raises:
        SelectionError: There is none, or backends of several kinds have the name and `kind` does
            not say which.
    """
    parsed = parse(selection)
    found = _found(parsed, kind)
    where = Selection(found.name, found.distribution, parsed.arguments)
    options, folder = found.options(parsed.arguments), folder or _temporary()
    return Subject(found, options, str(where), folder, seed, device or "cpu")


def _found(parsed: Selection, kind: str | None) -> Registered:
    known = registry()
    if kind is not None:
        if kind not in HOOKS:
            raise SelectionError(f"there is no kind {kind!r}; kinds: {', '.join(sorted(HOOKS))}")
        return known.find(kind, parsed)
    named = [k for k in HOOKS if any(r.name == parsed.name for r in known.of_kind(k))]
    found, errors = [], []
    for candidate in named:
        try:
            found.append(known.find(candidate, parsed))
        except SelectionError as error:
            errors.append(error)
    if len(found) == 1:
        return found[0]
    if found:
        kinds = " or ".join(f"--kind {one.kind}" for one in found)
        raise SelectionError(f"{parsed.name!r} is of several kinds; say which: {kinds}")
    if errors:
        raise errors[0]
    every = sorted({r.name for k in HOOKS for r in known.of_kind(k)})
    from jackfield.spelling import nearest

    raise SelectionError(
        f"no installed plugin offers a backend {parsed.name!r}{nearest(parsed.name, every)}; "
        "`jackfield plugins` lists them, and `pip install -e .` installs yours"
    )


@contextlib.contextmanager
def uninstalled(backend: Backend) -> Iterator[Subject]:
    """`backend` as a subject, known to the registry for the while though nobody installed it."""
    here = registry().backends[backend.kind]
    registered = Registered(backend, UNINSTALLED, "0", backend.name)
    here.append(registered)
    try:
        yield Subject(registered, backend.options(), f"plugin:{UNINSTALLED}/{backend.name}")
    finally:
        here.remove(registered)

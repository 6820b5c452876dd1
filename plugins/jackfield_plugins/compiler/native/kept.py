"""Graphs on disk: traced once a machine, read by the next process in milliseconds.

A graph is kept by everything that shapes it: the modules with their code, their numbers and the
shapes of their weights, the step's size, and the libraries that traced it. What lies in the folder
names operators of torch, which are called: it is the user's alone, and each file carries a digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import jackfield
from jackfield_plugins.compiler.holding import EVERYWHERE
from jackfield_plugins.compiler.native.fingerprint import Fingerprints, settings_of
from jackfield_plugins.compiler.native.graph import Graph
from jackfield_plugins.compiler.reaching import Reached
from jackfield_plugins.compiler.torch_code import own_name, torch_code
from jackfield_plugins.native.keeping import KeepingError, cache_root, keep, kept, own_folder

logger = logging.getLogger("jackfield")

_OURS = "jackfield_plugins."
_LIBRARIES = ("torch", "transformers", "jackfield")


class KeptGraphs:
    """The graphs of one model as it is now.

    `replaced` names a function of torch that is not torch's own any more; None: all are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.replaced = next((at for at, name in _torchs(model).items() if name is None), None)
        self._key: str | None = None
        self._folder: Path | None = None
        self._unread: set[tuple[int, int]] = set()  # of sizes whose file is told to be no graph
        if self.replaced is None:
            # An attribute may have no plain form.
            with contextlib.suppress(TypeError, ValueError):
                self._key = _key_of(model)
        if self._key is None:
            return
        try:
            self._folder = own_folder(cache_root() / "native-graphs")
        except KeepingError as error:
            logger.warning("graphs of native steps are traced anew in each process: %s", error)

    def read(self, rows: int, width: int) -> Graph | None:
        """The graph of a step of this size, where one was kept for just this model."""
        if self._folder is None or (rows, width) in self._unread:
            return None
        path = self._path(rows, width)
        found = kept(path)
        if isinstance(found, bytes):
            try:
                return Graph.load(found)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                found = f"is no graph ({error})"
        if found:
            logger.warning("%s %s; the step is traced anew", path, found)
            self._unread.add((rows, width))
        return None

    def keep(self, graph: Graph) -> bool:
        """For the next process; a graph with constants is traced by each. Whether it is on disk."""
        if self._folder is None or graph.constants:
            return False
        path = self._path(graph.rows, graph.width)
        try:
            content = graph.dump()
        except ValueError:  # an argument that has no form on disk, e.g. a complex number
            return False
        try:
            keep(path, content)
        except OSError as error:
            reason = error.strerror or error
            logger.warning("%s cannot be kept (%s): the next process traces it anew", path, reason)
            self._folder = None
            return False
        return True

    def _path(self, rows: int, width: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._key}-{rows}x{width}.json"


def _reached(model: nn.Module) -> Reached:
    return Reached(dict.fromkeys(type(module) for module in model.modules()))


def _torchs(model: nn.Module) -> dict[str, str | None]:
    """Where what a model's code calls of torch lies -> what torch calls it; None: it is not its."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    places = torch_code(classes, _reached(model).names)
    return {at: own_name(found) for at, _, _, found in places if found is not None}


def _key_of(model: nn.Module) -> str | None:
    """Stands for what `model` is; None where somebody's hook could be anything."""
    prints = Fingerprints()
    whole = [f"{name} {version(name)}" for name in _LIBRARIES]
    whole += [_own_sources(), str(torch.get_default_dtype()), repr(_torchs(model))]
    if any(EVERYWHERE):
        return None
    first: dict[int, str] = {}  # of each part: one that several share is in a graph by this name
    for name, module in model.named_modules(remove_duplicate=False):
        whole.append(f"{name} is {first.setdefault(id(module), name)}")
        if first[id(module)] != name:
            continue
        hooks: Any = (module._forward_hooks, module._forward_pre_hooks)
        kernel, home = getattr(vars(module).get("forward"), "made_by", (None, ""))
        # What a kernel of others calls may be anywhere; ours are among our own sources.
        if any(hooks) or ("forward" in vars(module) and not home.startswith(_OURS)):
            return None
        whole.append(f"{name} by {kernel}")
        whole.append(f"{name} {type(module).__module__}.{type(module).__qualname__}")
        settings = settings_of(module)
        settings.pop("forward", None)
        whole.append(prints.of(settings))
        for kind, tensors in (("p", module._parameters), ("b", module._buffers)):
            for key, tensor in tensors.items():
                told = None if tensor is None else (tensor.dtype, [*tensor.shape], tensor.stride())
                whole.append(f"{kind} {key} {told} {first.setdefault(id(tensor), f'{name}.{key}')}")
    reached = _reached(model)
    whole += prints.of_places(reached.places.values())
    whole += map(_sources_of, sorted(reached.modules))
    return hashlib.sha256("\0".join(whole).encode(errors="surrogatepass")).hexdigest()[:24]


@functools.cache
def _own_sources() -> str:
    """What traces and is traced: the version says nothing of a checkout that somebody edits."""
    roots = [Path(jackfield.__file__).parent, Path(__file__).parents[2]]
    return _digest(file for root in roots for file in root.rglob("*.py"))


@functools.cache
def _sources_of(home: str) -> str:
    """The package that a module is of, whose operators a graph calls, or its file."""
    top = home.partition(".")[0]
    package, own = (getattr(sys.modules.get(name), "__file__", None) for name in (top, home))
    if top == "transformers_modules" and own is not None:  # a folder for each model
        return _digest(Path(own).parent.glob("*.py"))
    if package is not None and Path(package).name == "__init__.py":
        return _digest(Path(package).parent.rglob("*.py"))
    return _digest([] if own is None else [Path(own)])


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        with contextlib.suppress(OSError):
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()

"""C++ of a backend: compiled with the machine's compiler, once a machine, and loaded.

A folder's `kernel.cpp` may include the headers of this folder. Kernels share torch's threads
through OpenMP's own entry, so they are for Linux, where torch brings that runtime.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jackfield.contracts.advice import advising
from jackfield.contracts.private_files import CACHE
from jackfield.errors import PlanError
from jackfield_plugins.native.compiling import CompilingError, compiler, library

Where = tuple[str | None, str | None]


@dataclass(frozen=True, eq=False)
class NativeKernel:
    """`kernel.cpp` in `folder`, for the backend `name`; `instead` is what can be chosen without.

    `defines`: macros that it is compiled with, `NAME=TEXT`.
    """

    name: str
    folder: Path
    instead: str
    defines: tuple[str, ...] = ()
    _loaded: dict[Where, ctypes.CDLL] = field(default_factory=dict)
    _failures: dict[Where, str] = field(default_factory=dict)

    def cannot_build(self) -> list[str]:
        """Why there can be no kernel on this machine."""
        if not sys.platform.startswith("linux"):
            return [f"is for Linux, where it shares torch's threads; this is {sys.platform}"]
        if compiler() is None:
            named = f" (CXX={os.environ['CXX']} is not one)" if os.environ.get("CXX") else ""
            reason = (
                "needs a C++ compiler (g++ or clang++) to compile its kernel once, and finds none"
            )
            return [f"{reason}{named}: install one, e.g. `apt install g++`"]
        return []

    def library(self) -> ctypes.CDLL:
        """The kernel of this machine; compiled, which takes some seconds, if it never was."""
        where = _where()
        if where not in self._loaded:
            try:
                self._loaded[where] = self._load()
            except CompilingError as error:
                raise PlanError(f"{self.name}: {error}") from None
        return self._loaded[where]

    def cannot_load(self) -> list[str]:
        """Why the kernel cannot be had; compiles it if it can be built and never was before, unless
        that is only asked for advice.

        A failure is remembered while the process lives: a compiler may take long to fail.
        """
        if reasons := self.cannot_build():
            return reasons
        where = _where()
        if advising() and where not in self._failures:
            return []
        if where not in self._failures:
            try:
                self.library()
            except PlanError as error:
                self._failures[where] = str(error).removeprefix(f"{self.name}: ")
        return [self._failures[where]] if where in self._failures else []

    def function(self, name: str) -> Callable[[bytes], bool]:
        """One of the library's, which takes a packed struct and says whether it could."""
        found = self.library()[name]
        found.argtypes, found.restype = [ctypes.c_char_p], ctypes.c_bool
        return found

    def address(self, name: str) -> int:
        """Where that function is."""
        return ctypes.cast(self.library()[name], ctypes.c_void_p).value or 0

    def built_with(self) -> str:
        """What reports say."""
        return f"its own kernel, compiled by {shlex.join(compiler() or [])}"

    def _load(self) -> ctypes.CDLL:
        command = compiler()
        if command is None:
            raise PlanError(f"{self.name} {self.cannot_build()[0]}")
        return library(self.name, self.folder, command, self.instead, self.defines)


def _where() -> Where:
    """What decides which binary is loaded, and may change while the process lives."""
    return os.environ.get("CXX"), os.environ.get(CACHE)

"""A process that may not use tiles (AMX), as where a sandbox refuses what Linux has to be asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield_plugins.native import compiling

if TYPE_CHECKING:
    from forking import Forks

#: Answers "operation not permitted" where a process asks for tiles.
_REFUSING = """
#include <cerrno>
#include <cstdarg>
#include <dlfcn.h>
#include <sys/syscall.h>
extern "C" long syscall(long number, ...) {
    va_list list;
    long with[6];
    va_start(list, number);
    for (long& one : with) one = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && with[0] == 0x1023) return errno = EPERM, -1;
    static const auto own = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return own(number, with[0], with[1], with[2], with[3], with[4], with[5]);
}
"""


def run_without_tiles(program: str, forks: Forks, folder: Path) -> None:
    """Run `program`, which may import tests of plugins, in such a process.

    `folder` holds what is loaded before it.
    """
    command = compiling.compiler()
    assert command is not None
    source, library = folder / "refusing.cpp", folder / "refusing.so"
    source.write_text(_REFUSING)
    made = compiling.run([*command, "-shared", "-fPIC", str(source), "-o", str(library)])
    assert made.returncode == 0
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "plugins")]
    found = "import sys; sys.path += sys.argv[1:]\n"
    environ = {**os.environ, "LD_PRELOAD": str(library)}
    done = forks.python("-c", found + program, *folders, env=environ)
    assert done.returncode == 0, done.stderr

"""C++ that ends the process where it does what the language does not define.

E.g. beyond the end of an array, or a shift by too much. What a compiler makes of these may work on
one processor and not on the next: tests that build kernels for other processors build them so.
"""

from __future__ import annotations

import functools

from jackfield_plugins.native import compiling

#: What costs nothing to compile. All of `undefined` takes three times as long.
TRAPS = (
    "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
)


@functools.cache
def traps() -> tuple[str, ...]:
    """The flags for it, where the machine's compiler knows them."""
    command = compiling.compiler() or []
    try:
        done = compiling.run([*command, *TRAPS, "-x", "c++", "-c", "/dev/null", "-o", "/dev/null"])
    except compiling.CompilingError:
        return ()
    return () if done.returncode else TRAPS


def trapping(level: str, *more: str) -> tuple[str, ...]:
    """The flags of kernels, optimized up to `level`, e.g. "-O1", with traps and `more`."""
    replaced = {"-O3", "-march=native"} if any("-march" in flag for flag in more) else {"-O3"}
    return (*[flag for flag in compiling.FLAGS if flag not in replaced], level, *traps(), *more)

"""Checks of a backend's module: it is imported whenever somebody looks for backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.subject import UNINSTALLED, Subject

SLOW = 1.0  # seconds of processor time
_PROGRAM = """
import json, sys, time
import jackfield, jackfield.contracts
before, begin = set(sys.modules), time.process_time()
__import__(sys.argv[1])
took = time.process_time() - begin
tops = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print("\\n" + json.dumps({"took": took, "with": tops}), file=sys.stderr)
"""
HEAVY = ("torch", "transformers", "tensorflow", "jax", "triton", "scipy", "pandas", "accelerate")


def checks(subject: Subject) -> Iterator[Check]:
    """Time, and what it prints."""
    yield Check("everyone.import", "contract", lambda _: _import(subject))


def _import(subject: Subject) -> str:
    if subject.registered.distribution == UNINSTALLED:
        raise NotTriedError("is not installed")
    module = type(subject.backend).__module__
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module],
        capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    *said, last = done.stderr.strip().splitlines() or [""]
    if done.returncode:
        raise WrongError(f"{module} cannot be imported by itself: {last[:200]}")
    if done.stdout.strip():
        raise WrongError(f"{module} prints when it is imported: {done.stdout.strip()[:80]!r}")
    if said := [line for line in said if line.strip()]:
        raise WrongError(f"{module} prints when it is imported: {said[0][:80]!r}")
    found = json.loads(last)
    heavy = [name for name in HEAVY if name in found["with"]]
    if found["took"] > SLOW:
        why = f" (with {', '.join(heavy)})" if heavy else ""
        raise WrongError(
            f"{module} takes {found['took']:.1f} s to import{why}; import in `bind` what is heavy"
        )
    return f"{1000 * found['took']:.0f} ms"

"""Whatever happens to sequences, in any order: a state machine, whose failures are made small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jackfield.errors import JackfieldError
from jackfield.testing.cache.bench import Bench
from jackfield.testing.checks import NotTriedError, WrongError

STEPS = 24


def storm(bench: Bench, name: str, examples: int, **needs: Any) -> str:
    """Drive the cache at random; raises WrongError that tells the shortest way to the fault."""
    try:
        import hypothesis
        from hypothesis import stateful
    except ImportError:
        raise NotTriedError("hypothesis is missing: pip install 'jackfield[check]'") from None
    from jackfield.testing.cache.machine import machine_of

    machine = machine_of(bench, name, needs)
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    seeded: Any = hypothesis.seed(bench.subject.seed)(machine)
    try:
        # hypothesis tells its steps
        with contextlib.redirect_stdout(None), _no_constants_of_modules():
            stateful.run_state_machine_as_test(seeded, settings=settings)
    except Exception as error:
        last = machine.last
        if last is None:
            raise
        why = str(error) if isinstance(error, WrongError | JackfieldError) else repr(error)
        raise WrongError(f"{why}; after: {'; '.join(last.done)}") from error
    return f"{machine.count} sequences in {examples} runs of up to {STEPS} acts"


@contextlib.contextmanager
def _no_constants_of_modules() -> Iterator[None]:
    """Keep hypothesis from drawing numbers that it finds in the source of imported modules.

    It reads every module outside `site-packages`: half a minute where libraries lie elsewhere. And
    one seed would make other runs on another machine.
    """
    from hypothesis.internal.conjecture import providers

    if not hasattr(providers, "_get_local_constants"):  # before 6.131
        yield
        return
    none_of_them = type(providers._local_constants)
    with mock.patch.object(providers, "_get_local_constants", none_of_them):
        yield

"""What a cache does not declare, it refuses before weights are loaded, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from jackfield.contracts.cache import LAYER_TYPES
from jackfield.contracts.requirements import DTYPES
from jackfield.errors import JackfieldError
from jackfield.planning.solving import reasons_against
from jackfield.testing.cache.bench import BASES, Bench
from jackfield.testing.checks import Check, WrongError


def refusals(bench: Bench) -> Iterator[Check]:
    declared = bench.declared
    for kind in sorted(set(LAYER_TYPES) - bench.held):
        yield _refused(bench, f"layer_types.{kind}", f"layer_types: {kind}", _model(bench, kind))
    for dtype in sorted(set(DTYPES) - declared.dtypes):
        yield _refused(bench, f"dtypes.{dtype}", f"dtypes: {dtype}", _dtype(bench, dtype))
    for kind in sorted(declared.layer_types - declared.rollback):
        run = _model(bench, kind, decoding="prompt_lookup")
        yield _refused(bench, f"rollback.{kind}", f"rollback: {kind}", run)
    if not declared.forks:
        yield _refused(bench, "forks", "forks", _model(bench, "", decoding="beam"))
    if not declared.compiles:
        yield _refused(bench, "compiles", "compiles", _needing(bench, compiled=True))
    if not bench.packed:
        run = _model(bench, "", deterministic=True)
        yield _refused(bench, "batch_invariant", "layout: packed", run)
    if not declared.recordable:
        yield _refused(bench, "recordable", "recordable", _unrecordable(bench))


def _refused(bench: Bench, name: str, capability: str, run: Callable[[], str]) -> Check:
    def refused(_: object) -> str:
        why = run()
        own = bench.subject.backend.name
        if own not in why:
            raise WrongError(f"is refused, but not by its name {own!r}: {why}")
        return why

    return Check(f"refused.{name}", capability, refused, refusal=True)


def _model(bench: Bench, kind: str, **more: Any) -> Callable[[], str]:
    """Planning of a model with layers of a kind, and of the simplest one for ""."""

    def run() -> str:
        bench.plan(bench.base)
        name = BASES[kind] if kind else bench.base
        return _why(bench, name, None, f"{kind} {more or ''}".strip(), more)

    return run


def _dtype(bench: Bench, dtype: str) -> Callable[[], str]:
    def run() -> str:
        bench.plan(bench.base)
        return _why(bench, bench.base, dtype, dtype, {})

    return run


def _why(bench: Bench, name: str, dtype: str | None, what: str, more: dict[str, Any]) -> str:
    found = bench.planned(name, dtype, **more)
    if not isinstance(found, JackfieldError):
        raise WrongError(
            f"is planned for {what}, which it does not declare; declare it, or let "
            "`capabilities.lacks` refuse it: extend super().refuse(…), do not replace it"
        )
    return str(found)


def _needing(bench: Bench, **needs: Any) -> Callable[[], str]:
    """The same by its own reasons, for what other backends may refuse on this machine."""

    def run() -> str:
        own = bench.subject
        requirements = replace(bench.plan(bench.base).requirements, **needs)
        reasons = reasons_against(own.registered, requirements, own.options)
        if not reasons:
            raise WrongError(f"has no reason against {needs}, which it does not declare")
        return f"{own.backend.name} ({'; '.join(reasons)})"

    return run


def _unrecordable(bench: Bench) -> Callable[[], str]:
    def run() -> str:
        own = bench.subject
        requirements = bench.plan(bench.base).requirements
        reasons = own.registered.ask("unrecordable", requirements, own.options)
        if not reasons:
            raise WrongError("`unrecordable` has no reason, and it does not declare recordable")
        return f"{own.backend.name} ({'; '.join(reasons)})"

    return run

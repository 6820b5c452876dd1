"""Checks of what a strategy declares: what it implies, and what must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jackfield.api import plan
from jackfield.contracts import Requirements
from jackfield.engine.engine import Engine
from jackfield.errors import JackfieldError
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.decoding.asked import EVERY, SEEDS, VALUES
from jackfield.testing.decoding.plain import exact
from jackfield.testing.decoding.texts import needs
from jackfield.testing.engines import engine_with
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """Of every decoding."""
    own = subject.backend.capabilities
    yield Check("declared.imply", "contract", lambda _: _imply(subject))
    if own.rollback or own.forks:
        yield Check(
            "declared.deterministic",
            "batch_invariant",
            lambda _: _refused(subject, "batch-invariant bits", deterministic=True),
            refusal=True,
        )
    if subject.wants_draft_model:
        yield Check("declared.assistant", "assistant", lambda _: _alone(subject), refusal=True)
    else:
        yield Check(
            "declared.assistant",
            "assistant",
            lambda _: _refused(subject, "assistant_model", assistant_model=exact(subject.seed)),
            refusal=True,
        )
    if missing := sorted(EVERY - own.settings):
        yield Check(
            "declared.settings",
            f"settings: {', '.join(missing)}",
            lambda _: _settings(subject, missing),
            refusal=True,
        )


def of_heads(subject: Subject) -> Iterator[Check]:
    """Of one that drafts with a model's own heads."""
    yield Check("declared.heads", "heads", lambda _: _refused(subject, "no heads"), refusal=True)
    yield Check("texts.greedy", "contract", lambda _: _no_heads())


def _no_heads() -> None:
    raise NotTriedError("no model of the checks has heads; compare texts with one of yours")


def _imply(subject: Subject) -> None:
    """What the cache must be able to do is what the strategy declares."""
    model, own = exact(subject.seed), subject.backend.capabilities
    needs_ = plan(model, decoding=subject.selection, **needs(subject)).requirements
    bare = replace(needs_, rollback=False, forks=False)
    implied = subject.backend.imply(bare, subject.options)
    if not isinstance(implied, Requirements):
        raise WrongError(f"imply must return Requirements, not {implied!r:.60}")
    for name in ("rollback", "forks"):
        if getattr(own, name) and not getattr(implied, name):
            raise WrongError(
                f"declares {name}, and imply does not ask the cache for it; extend what "
                "super().imply returns"
            )
    other = subject.backend.imply(replace(bare, rollback=True, forks=True), subject.options)
    for name in ("rollback", "forks"):
        if not getattr(other, name):
            raise WrongError(f"imply takes back what others asked for: {name}")


def _refused(subject: Subject, what: str, **arguments: Any) -> str:
    try:
        plan(
            exact(subject.seed),
            decoding=subject.selection,
            **{**needs(subject), **arguments},
        )
    except JackfieldError as error:
        if subject.registered.name not in str(error):
            raise WrongError(f"{what}: the refusal does not name the backend: {error}") from None
        return str(error)
    raise WrongError(f"a plan with {what} accepts it, which it does not declare")


def _alone(subject: Subject) -> str:
    """Without a draft model."""
    try:
        plan(exact(subject.seed), decoding=subject.selection)
    except JackfieldError as error:
        return str(error)
    raise WrongError("declares that it needs a draft model, and is planned without one")


def _settings(subject: Subject, missing: list[str]) -> str:
    with engine_with(subject, exact(subject.seed), **needs(subject)) as (engine, _):
        for name in missing:
            _asks(engine, name)
    return f"{len(missing)} settings refused"


def _asks(engine: Engine, name: str) -> None:
    wanted = {"max_new_tokens": 2, name: VALUES[name].get(name, SEEDS[0])}
    try:
        engine.generate([[5, 6, 7]], **wanted)
    except JackfieldError:
        return
    raise WrongError(f"{name} is not declared, and a request with it is not refused")

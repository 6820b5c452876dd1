"""A lock: which backends run a model, with the versions and contents of all that they consist of.

`lock_of` makes one from a plan, `opened` takes what a caller left open from one, and `check`
refuses a plan that is not the one that was locked. Nothing here asks the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jackfield.errors import PlanError, SelectionError, UsageError, shown
from jackfield.planning.fused import NO_KERNEL
from jackfield.planning.installed_code import ABSENT, content_of, versions_of
from jackfield.planning.solving import ARGUMENTS
from jackfield.spelling import AUTO, Selection

if TYPE_CHECKING:
    from jackfield.planning.planning import Plan
    from jackfield.planning.spec import PlanSpec
    from jackfield.registry.backends import Choice, Registry

VERSION = 1
LARGEST = 1_000_000  # bytes of a lock file
DRAFT = "draft model's "  # in front of the roles in its plan

Spec = TypeVar("Spec", bound="PlanSpec")


@dataclass(frozen=True)
class Lock:
    """What a lock file says.

    Attributes:
        file: Its name, for messages.
        backends: What runs as ("attention", "decoding sample", "draft model's cache", …) -> its
            row, as `lock_of` writes it.
        libraries: Distribution -> version; "python" too.
        remedy: What to do, other than to install what was locked; for messages.
    """

    file: str
    backends: Mapping[str, Mapping[str, Any]]
    libraries: Mapping[str, str]
    remedy: str = "write the lock anew with `jackfield lock`"


def lock_of(plan: Plan) -> dict[str, Any]:
    """The content of a lock file for `plan`; made of texts, numbers and None."""
    rows = {role: _row(plan, choice) for role, choice in _roles(plan)}
    return {
        "version": VERSION,
        "backends": rows,
        "libraries": versions_of({row["distribution"] for row in rows.values()}),
    }


def _roles(plan: Plan, whose: str = "") -> Iterator[tuple[str, Choice]]:
    for kind, choice in plan.choices.items():
        if kind != "decoding":
            yield f"{whose}{kind}", choice
    for name, choice in plan.decodings.items():
        yield f"{whose}decoding {name}", choice
    for choice in plan.kernels:
        yield f"{whose}kernel {choice.registered.name}", choice
    if plan.assistant is not None:
        yield from _roles(plan.assistant, DRAFT)


def _row(plan: Plan, choice: Choice) -> dict[str, Any]:
    one, row = choice.registered, choice.to_dict()
    return {
        "name": one.name,
        "distribution": one.distribution,
        "version": one.version,
        "options": row["options"],
        "content": content_of(type(one.backend).__module__),
        "pins": dict(one.ask("pins", plan.requirements, choice.options)),
    }


def read_lock(file: str | Path) -> Lock:
    """Read a lock file. Raises UsageError where there is none, or it is none."""
    path = Path(file)
    try:
        text = path.read_bytes()[: LARGEST + 1] if path.is_file() else None
    except OSError as error:
        raise UsageError(f"the lock {shown(path)} cannot be read: {error.strerror}") from None
    if text is None:
        raise UsageError(f"there is no lock {path}; `jackfield lock -o {path}` writes one")
    try:
        found = json.loads(text) if len(text) <= LARGEST else None
    except (ValueError, RecursionError):
        found = None
    if found is None or not _is_lock(found):
        raise UsageError(f"{path} is no lock of jackfield; `jackfield lock -o {path}` writes one")
    if found["version"] != VERSION:
        raise UsageError(
            f"the lock {path} is of version {found['version']}, and this jackfield reads "
            f"{VERSION}; write it anew with `jackfield lock`"
        )
    remedy = {"remedy": shown(found["remedy"])} if "remedy" in found else {}
    return Lock(str(path), found["backends"], found["libraries"], **remedy)


def _is_lock(found: Any) -> bool:
    if not isinstance(found, dict) or {"version", "backends", "libraries"} - found.keys():
        return False
    backends, libraries = found["backends"], found["libraries"]
    return (
        isinstance(backends, dict)
        and isinstance(libraries, dict)
        and all(isinstance(version, str) for version in libraries.values())
        and all(isinstance(row, dict) and _is_row(row) for row in backends.values())
    )


def _is_row(row: dict[str, Any]) -> bool:
    texts = all(
        isinstance(row.get(key), str) for key in ("name", "distribution", "version", "content")
    )
    return texts and all(isinstance(row.get(key), dict) for key in ("options", "pins"))


def opened(spec: Spec, registry: Registry) -> tuple[Spec, Lock | None]:
    """The lock that `spec` names, and `spec` with what it leaves open taken from there.

    Raises UsageError for a file that is no lock, PlanError where it names what is not here.
    """
    if spec.locked is None:
        return spec, None
    lock = read_lock(spec.locked)
    check_installed(lock, registry)
    return from_lock(spec, lock), lock


def check_installed(lock: Lock, registry: Registry) -> None:
    """Raise PlanError where a backend of the lock is not to be had here."""
    lacking = []
    for role, row in lock.backends.items():
        kind = role.removeprefix(DRAFT).split(" ")[0]
        try:
            registry.find(kind, Selection(row["name"], row["distribution"]))
        except (SelectionError, KeyError):
            causes = [
                f" ({plugin.cause})"
                for plugin in registry.plugins
                if plugin.distribution == row["distribution"] and plugin.cause
            ]
            who = f"{role} {row['name']} of {row['distribution']} {row['version']}"
            lacking.append(shown(who) + shown("".join(causes[:1])))
    if lacking:
        raise PlanError(
            f"{lock.file} locks what is not installed here, or does not load: {'; '.join(lacking)}"
        )


def from_lock(spec: Spec, lock: Lock) -> Spec:
    """`spec`, in which the lock names what the caller left to `auto`."""
    named: dict[str, Any] = {}
    for kind, argument in ARGUMENTS.items():
        if getattr(spec, argument) != AUTO:
            continue
        rows = [row for role, row in lock.backends.items() if role.split(" ")[0] == kind]
        texts = [_selected(row) for row in rows]
        if kind == "kernel":
            named[argument] = texts or NO_KERNEL
        elif kind == "decoding":
            roles = [role.partition(" ")[2] for role in lock.backends if role.startswith(kind)]
            named |= {argument: dict(zip(roles, texts, strict=True))} if texts else {}
        elif texts:
            named[argument] = texts[0]
    return replace(spec, **named)


def _selected(row: Mapping[str, Any]) -> str:
    options = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in row["options"].items()
        if value is not None
    }
    return str(Selection(row["name"], row["distribution"], options))


def check(plan: Plan, lock: Lock) -> None:
    """Raise PlanError with everything that is not as it was locked."""
    now = lock_of(plan)
    apart = [
        *_apart_of_backends(lock.backends, now["backends"]),
        *_apart("library ", lock.libraries, now["libraries"]),
    ]
    if apart:
        raise PlanError(
            f"not what {lock.file} locks: {'; '.join(apart)}; install what was locked, or "
            f"{lock.remedy}"
        )


def _apart_of_backends(
    was: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for role in sorted(was.keys() | now.keys()):
        if role not in now:
            yield f"{shown(role)} {shown(was[role]['name'])} does not run"
        elif role not in was:
            yield f"{role} {now[role]['name']} runs, and is not in it"
        else:
            yield from _apart_of_row(role, was[role], now[role])


def _apart_of_row(role: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    who = [f"{row['name']} of {row['distribution']} {row['version']}" for row in (was, now)]
    if who[0] != who[1]:
        yield f"{role} was {shown(who[0])} and is {who[1]}"
        return
    if was["options"] != json.loads(json.dumps(now["options"], default=str)):
        had, has = shown(was["options"]), now["options"]
        yield f"{role} {now['name']} had the options {had} and has {has}"
    if was["content"] != now["content"]:
        yield (
            f"the files of {who[1]}, which {role} runs on, are {now['content'][:19]}… and were "
            f"{shown(was['content'][:19])}…"
        )
    yield from _apart(f"{role}'s ", was["pins"], now["pins"])


def _apart(what: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(was.keys() | now.keys()):
        old, new = was.get(name, ABSENT), now.get(name, ABSENT)
        if old != new:
            yield f"{what}{shown(name)} was {shown(old)} and is {shown(new)}"

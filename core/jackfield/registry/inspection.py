"""Inspects what is installed and whether it fits together: findings, each with what to do."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Mapping

from jackfield.registry.backends import PluginRecord, Registry
from jackfield.registry.discovery import GROUP, registry
from jackfield.registry.findings import Finding
from jackfield.registry.installed import first_on_path, libraries, stale
from jackfield.registry.machine import compilers, devices
from jackfield.spelling import nearest

#: Environment variables that jackfield reads.
VARIABLES = ("JACKFIELD_DISABLE", "JACKFIELD_LOAD_TIMEOUT", "JACKFIELD_PLUGINS")


def examine() -> list[Finding]:
    """Every finding about this process and its environment."""
    installed = list(importlib.metadata.distributions())
    found = registry()
    usable = list(devices())
    gpu = any(finding.subject.startswith("cuda:") for finding in usable)
    return [
        *plugins(found),
        *libraries(first_on_path(installed)),
        *stale(installed, {record.distribution for record in found.plugins}),
        *variables(os.environ, found.warnings),
        *usable,
        *compilers(first_on_path(installed), gpu=gpu),
    ]


def plugins(found: Registry) -> Iterator[Finding]:
    """One finding an entry point."""
    if not found.plugins:
        yield Finding(
            "plugins", GROUP, "problem", "no plugin is installed, not even the built-in ones",
            "reinstall with `pip install --force-reinstall --no-deps jackfield`",
        )  # fmt: skip
    for record in found.plugins:
        yield _plugin(record)


def _plugin(record: PluginRecord) -> Finding:
    subject = f"{record.entry_point} of {record.distribution} {record.version}"
    if record.state == "disabled":
        message, advice = f"disabled: {record.cause}", "change that variable to have it back"
        return Finding("plugins", subject, "warning", message, advice)
    if record.state == "failed":
        advice = (
            f"repair or upgrade {record.distribution}, uninstall it, or leave it out with "
            f"JACKFIELD_DISABLE={record.entry_point}"
        )
        return Finding("plugins", subject, "problem", f"failed: {record.cause}", advice)
    if record.problems:
        advice = (
            f"tell the authors of {record.distribution}, or leave it out with "
            f"JACKFIELD_DISABLE={record.entry_point}"
        )
        return Finding("plugins", subject, "warning", "; ".join(record.problems), advice)
    return Finding("plugins", subject, "ok", f"offers {', '.join(record.backends)}")


def variables(environ: Mapping[str, str], warnings: Iterable[str]) -> Iterator[Finding]:
    """The JACKFIELD_ variables that are set, and what discovery warned of."""
    for name in sorted(environ):
        if name in VARIABLES:
            yield Finding("environment", name, "ok", f"is set to {environ[name]!r}")
        elif name.startswith("JACKFIELD_"):
            message = f"is set, but nothing reads it{nearest(name, VARIABLES)}"
            yield Finding("environment", name, "warning", message, "unset or rename it")
    for warning in warnings:
        subject = next((v for v in VARIABLES if warning.startswith(v)), None)
        if subject is None:
            yield Finding("environment", "discovery", "warning", warning)
        else:
            message = warning.removeprefix(subject).strip()
            yield Finding("environment", subject, "warning", message, "correct the variable")

"""Find the installed plugins: entry points of group ``jackfield``, each loaded on its own.

pluggy's own `load_setuptools_entrypoints` has no isolation (one ImportError ends discovery) and
drops the second of two equal names without a word, so this is a small loader of our own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from packaging.utils import canonicalize_name

from jackfield.errors import PluginError, error_text
from jackfield.registry.backends import PluginRecord, Registered, Registry
from jackfield.registry.kept_streams import is_loading
from jackfield.registry.loading import DISTRIBUTION as DISTRIBUTION
from jackfield.registry.loading import Offer, Source, load, trials

logger = logging.getLogger("jackfield")

GROUP = "jackfield"


def registry() -> Registry:
    """The registry of this process; made at the first call."""
    if is_loading():
        raise PluginError("a plugin asks for backends while it is loaded; let it do so in bind")
    with _lock:
        return _made()


_lock = threading.Lock()


@functools.cache
def _made() -> Registry:
    entry_points, warnings = installed()
    found = discover(entry_points, os.environ)
    found.warnings += warnings
    return found


def installed() -> tuple[list[importlib.metadata.EntryPoint], list[str]]:
    """The entry points of our group, and a warning per distribution that cannot be read.

    `importlib.metadata.entry_points` gives nothing at all where one of many distributions has a
    malformed `entry_points.txt`; only then each distribution is read by itself, which is slower.
    """
    try:
        return list(importlib.metadata.entry_points(group=GROUP)), []
    except Exception as error:  # noqa: BLE001 - any distribution on the path can cause anything
        logger.debug("reading distributions one by one: %s", error_text(error))
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    warnings = []
    for dist in importlib.metadata.distributions():
        try:
            name = canonicalize_name(dist.name)
            if name not in found:  # the first on the path is the one that is imported
                found[name] = list(dist.entry_points.select(group=GROUP))
        except Exception as error:  # noqa: BLE001 - as above
            name = vars(dist).get("_path", dist)
            warnings.append(
                f"the metadata in {name} cannot be read, reinstall it: {error_text(error)}"
            )
    return [entry_point for several in found.values() for entry_point in several], warnings


def discover(
    entry_points: Iterable[importlib.metadata.EntryPoint], environ: Mapping[str, str]
) -> Registry:
    """Load every plugin that `environ` allows; failures are recorded, never raised.

    `JACKFIELD_PLUGINS` and `JACKFIELD_DISABLE` hold distributions or entry points, separated by
    commas. `JACKFIELD_LOAD_TIMEOUT` is how many seconds one plugin may take to load (20).
    """
    sources = sorted(
        map(Source.of, entry_points),
        key=lambda s: (canonicalize_name(s.distribution), s.entry_point.name, s.entry_point.value),
    )
    gate = _Gate(environ, sources)
    results = iter(trials([s for s in sources if not gate.closed(s)], gate.timeout))
    claims = []
    for source in sources:
        entry_point = source.entry_point
        record = PluginRecord(
            entry_point.name, entry_point.value, source.distribution, source.version, "loaded"
        )
        offers: list[Offer] = []
        if reason := gate.closed(source):
            record = replace(record, state="disabled", cause=reason)
        else:
            try:
                offers, problems = load(source, gate.timeout, next(results))
                record = replace(record, problems=tuple(problems))
            except PluginError as error:
                logger.debug("plugin %s failed to load", entry_point.name, exc_info=True)
                record = replace(record, state="failed", cause=str(error))
        claims.append((record, offers))
    return _register(claims, gate.warnings)


class _Gate:
    """What the environment allows. A name in it that matches nothing is a warning, not silence."""

    def __init__(self, environ: Mapping[str, str], sources: list[Source]) -> None:
        self.warnings: list[str] = []
        known = {name for source in sources for name in self._names_of(source)}
        self.allowed = self._names(environ, "JACKFIELD_PLUGINS", known)
        self.blocked = self._names(environ, "JACKFIELD_DISABLE", known) or frozenset()
        self.timeout = self._seconds(environ.get("JACKFIELD_LOAD_TIMEOUT", "20"))

    @staticmethod
    def _names_of(source: Source) -> set[str]:
        return {canonicalize_name(n) for n in (source.distribution, source.entry_point.name)}

    def _names(
        self, environ: Mapping[str, str], variable: str, known: set[str]
    ) -> frozenset[str] | None:
        if variable not in environ:
            return None
        names = {name.strip() for name in environ[variable].split(",")} - {""}
        for name in sorted(names):
            if canonicalize_name(name) not in known:
                self.warnings.append(f"{variable} names {name!r}, which is not installed")
        return frozenset(map(canonicalize_name, names))

    def _seconds(self, text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if seconds > 0:
            return min(seconds, threading.TIMEOUT_MAX)
        self.warnings.append(
            f"JACKFIELD_LOAD_TIMEOUT must be a number of seconds, not {text!r}; it is 20 now"
        )
        return 20.0

    def closed(self, source: Source) -> str | None:
        names = self._names_of(source)
        if self.allowed is not None and not names & self.allowed:
            return "not in JACKFIELD_PLUGINS"
        return "in JACKFIELD_DISABLE" if names & self.blocked else None


def _register(claims: list[tuple[PluginRecord, list[Offer]]], warnings: list[str]) -> Registry:
    """Add the backends; a name that is taken stays usable only with its distribution in front.

    jackfield's own names are its own: who else claims one does not take it away from anybody.
    Inside one distribution a prefix is no way out, so there the first claim is the only one.
    """
    own = set().union(*(_own_names(record, offers) for record, offers in claims))
    claimants: defaultdict[tuple[str, str], list[PluginRecord]] = defaultdict(list)
    for record, offers in claims:
        for kind, name, _ in offers:
            if _ours(record) or (kind, canonicalize_name(name)) not in own:
                claimants[kind, canonicalize_name(name)].append(record)
    result = Registry(warnings=warnings)
    for record, offers in claims:
        problems, names = [], []
        for kind, name, backend in offers:
            where = f"'plugin:{record.distribution}/{name}'"
            if not (bare := _ours(record) or (kind, canonicalize_name(name)) not in own):
                problems.append(
                    f"{kind} {name!r} is a name of jackfield's own: only {where} is this one"
                )
            elif rivals := _rivals(claimants[kind, canonicalize_name(name)], record):
                problems.append(f"{kind} {name!r} is also claimed by {rivals}: write {where}")
            if any(
                r.name == name and r.distribution == record.distribution
                for r in result.of_kind(kind)
            ):
                problems.append(f"the second {kind} {name!r} of one distribution is unused")
                continue
            result.backends[kind].append(
                Registered(
                    backend, record.distribution, record.version, record.entry_point, name, bare
                )
            )
            names.append(f"{kind}:{name}")
        problems = [*record.problems, *problems]
        result.plugins.append(replace(record, problems=tuple(problems), backends=tuple(names)))
    return result


def _ours(record: PluginRecord) -> bool:
    return canonicalize_name(record.distribution) == DISTRIBUTION


def _own_names(record: PluginRecord, offers: list[Offer]) -> set[tuple[str, str]]:
    """What jackfield's own distribution offers, as names that '-', '_' and '.' do not tell apart.

    Its entry points are called kind-name, so this holds where one was left out or failed, too.
    """
    if not _ours(record):
        return set()
    kind, _, name = record.entry_point.partition("-")
    return {(kind, name), *((o.kind, canonicalize_name(o.name)) for o in offers)}


def _rivals(claimants: list[PluginRecord], own: PluginRecord) -> str:
    return ", ".join(
        f"{r.distribution} {r.version} ({r.entry_point})" for r in claimants if r is not own
    )

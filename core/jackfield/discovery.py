"""Find the installed plugins: entry points of group ``jackfield``, each loaded on its own.

pluggy's own `load_setuptools_entrypoints` has no isolation (one ImportError ends discovery) and
drops the second of two equal names without a word, so this is a small loader of our own around a
pluggy manager: pluggy parses and checks the hooks, and is not used once backends are collected.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType

import pluggy

from jackfield import hookspecs
from jackfield.contracts import CONTRACTS, Backend
from jackfield.errors import PluginError
from jackfield.hookspecs import HOOKS
from jackfield.registry import PluginRecord, Registered, Registry
from jackfield.selection import nearest

GROUP = "jackfield"
DISTRIBUTION = "jackfield"


@functools.cache
def registry() -> Registry:
    """The registry of this process; made at the first call."""
    return discover(importlib.metadata.entry_points(group=GROUP), os.environ)


@dataclass(frozen=True)
class _Source:
    """An entry point with the metadata of its distribution."""

    entry_point: importlib.metadata.EntryPoint
    distribution: str
    version: str
    requires: tuple[str, ...]

    def record(self) -> PluginRecord:
        return PluginRecord(
            self.entry_point.name,
            self.entry_point.value,
            self.distribution,
            self.version,
            state="loaded",
        )


def discover(
    entry_points: Iterable[importlib.metadata.EntryPoint], environ: Mapping[str, str]
) -> Registry:
    """Load every plugin that `environ` allows; failures are recorded, never raised.

    `JACKFIELD_PLUGINS` and `JACKFIELD_DISABLE` hold distributions or entry points, separated by
    commas. `JACKFIELD_LOAD_TIMEOUT` is how many seconds one plugin may take to import (20).
    """
    sources = sorted(map(_source, entry_points), key=lambda s: (s.distribution, s.entry_point.name))
    result = Registry()
    gate = _Gate(environ, sources)
    result.warnings += gate.warnings
    manager = pluggy.PluginManager("jackfield")
    manager.add_hookspecs(hookspecs)
    for source in sources:
        record = source.record()
        if reason := gate.closed(source):
            result.plugins.append(replace(record, state="disabled", cause=reason))
            continue
        try:
            _check_version_contract(source)
            module = _load(source, gate.timeout)
            offered = _collect(manager, module, source)
        except PluginError as error:
            result.plugins.append(replace(record, state="failed", cause=str(error)))
            continue
        result.plugins.append(_register(result, record, offered))
    return result


def _source(entry_point: importlib.metadata.EntryPoint) -> _Source:
    dist = entry_point.dist
    if dist is None:
        return _Source(entry_point, "unknown", "0", ())
    return _Source(entry_point, dist.name, dist.version, tuple(dist.requires or ()))


class _Gate:
    """What the environment allows. A name in it that matches nothing is a warning, not silence."""

    def __init__(self, environ: Mapping[str, str], sources: list[_Source]) -> None:
        self.warnings: list[str] = []
        known = {s.distribution for s in sources} | {s.entry_point.name for s in sources}
        self.allowed = self._names(environ, "JACKFIELD_PLUGINS", known)
        self.blocked = self._names(environ, "JACKFIELD_DISABLE", known) or frozenset()
        self.timeout = self._seconds(environ.get("JACKFIELD_LOAD_TIMEOUT", "20"))

    def _names(
        self, environ: Mapping[str, str], variable: str, known: set[str]
    ) -> frozenset[str] | None:
        if variable not in environ:
            return None
        names = {name.strip() for name in environ[variable].split(",")} - {""}
        for name in sorted(names - known):
            self.warnings.append(f"{variable} names {name!r}, which is not installed")
        return frozenset(names)

    def _seconds(self, text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if seconds > 0:
            return seconds
        self.warnings.append(f"JACKFIELD_LOAD_TIMEOUT must be a number of seconds, not {text!r}")
        return 20.0

    def closed(self, source: _Source) -> str | None:
        names = {source.distribution, source.entry_point.name}
        if self.allowed is not None and not names & self.allowed:
            return "not in JACKFIELD_PLUGINS"
        return "in JACKFIELD_DISABLE" if names & self.blocked else None


def _check_version_contract(source: _Source) -> None:
    """Refuse a plugin that needs another jackfield, before any of its code runs."""
    if source.distribution == DISTRIBUTION:
        return
    for text in source.requires:
        if not text.lower().startswith(DISTRIBUTION):
            continue
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        from jackfield import __version__

        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != DISTRIBUTION:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            raise PluginError(
                f"needs jackfield{requirement.specifier}, this is jackfield {__version__}: "
                f"upgrade one of the two"
            )


def _load(source: _Source, timeout: float) -> ModuleType:
    """Import the plugin's module. In a thread, so that one that hangs is reported, not waited for.

    BaseException, because a plugin that calls sys.exit() on import must not end its host.
    """
    outcome: list[ModuleType | BaseException] = []

    def load() -> None:
        try:
            outcome.append(source.entry_point.load())
        except BaseException as error:  # noqa: BLE001 - see above
            outcome.append(error)

    thread = threading.Thread(target=load, name=f"load {source.entry_point.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise PluginError(f"import of {source.entry_point.value} did not end within {timeout:g} s")
    (module,) = outcome
    if isinstance(module, ModuleNotFoundError) and module.name == source.entry_point.module:
        raise PluginError(
            f"its entry point names the module {module.name}, which does not exist: the installed "
            f"metadata is stale, reinstall {source.distribution}"
        )
    if isinstance(module, BaseException):
        raise PluginError(f"import failed: {type(module).__name__}: {module}") from module
    return module


def _collect(
    manager: pluggy.PluginManager, module: ModuleType, source: _Source
) -> list[tuple[str, Backend]]:
    """The (kind, backend) pairs that one module offers through its hooks."""
    name = f"{source.distribution}:{source.entry_point.name}"
    try:
        manager.register(module, name)
        manager.check_pending()
    except Exception as error:
        misspelt = _misspelt(manager, module)
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise PluginError(misspelt or f"{type(error).__name__}: {error}") from error
    offered = []
    for kind, hook_name in HOOKS.items():
        for impl in getattr(manager.hook, hook_name).get_hookimpls():
            if impl.plugin is module:
                offered += [(kind, backend) for backend in _offers(impl.function, hook_name, kind)]
    if not offered:
        raise PluginError(
            f"{source.entry_point.value} implements no hook ({', '.join(HOOKS.values())})"
        )
    return offered


def _misspelt(manager: pluggy.PluginManager, module: ModuleType) -> str | None:
    for hook in manager.get_hookcallers(module) or []:
        if not hook.has_spec():
            return f"there is no hook {hook.name!r}{nearest(hook.name, HOOKS.values())}"
    return None


def _offers(function: object, hook: str, kind: str) -> list[Backend]:
    try:
        backends = list(function())  # type: ignore[operator]
    except Exception as error:
        raise PluginError(f"hook {hook} raised {type(error).__name__}: {error}") from error
    for backend in backends:
        if not isinstance(backend, CONTRACTS[kind]):
            raise PluginError(
                f"hook {hook} must return instances of {CONTRACTS[kind].__name__}, got {backend!r}"
            )
        if flaws := type(backend).flaws():
            raise PluginError(f"{type(backend).__name__} from hook {hook}: {'; '.join(flaws)}")
    return backends


def _register(
    result: Registry, record: PluginRecord, offered: list[tuple[str, Backend]]
) -> PluginRecord:
    """Add the backends; a name that is taken stays usable only with its distribution in front."""
    problems, names = [], []
    for kind, backend in offered:
        rivals = [r for r in result.backends[kind] if r.name == backend.name]
        if rivals:
            problems.append(f"{kind} {backend.name!r} is also claimed by {_who(rivals)}")
        if any(r.distribution == record.distribution for r in rivals):
            continue  # a second claim inside one distribution could never be addressed
        result.backends[kind].append(
            Registered(backend, record.distribution, record.version, record.entry_point)
        )
        names.append(f"{kind}:{backend.name}")
    return replace(record, problems=tuple(problems), backends=tuple(names))


def _who(rivals: list[Registered]) -> str:
    return ", ".join(f"{r.distribution} {r.version} ({r.entry_point})" for r in rivals)

"""Load one plugin: check its metadata, import its module, collect what its hooks offer.

pluggy parses and checks the hooks; each plugin gets a manager of its own, so that what one does
(a misspelt hook, a module that two entry points name) cannot change how another one loads.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jackfield import hookspecs
from jackfield.contracts import CONTRACTS, Backend
from jackfield.contracts.backend import NAME
from jackfield.errors import PluginError, error_text, quoted
from jackfield.hookspecs import HOOKS
from jackfield.registry.contained import Seen, contained
from jackfield.registry.kept_streams import loads
from jackfield.registry.trial_process import end_all, tried
from jackfield.registry.trial_results import TrialResult, path_of, recall, remember
from jackfield.spelling import nearest

DISTRIBUTION = "jackfield"
SIDE_BY_SIDE = 4  # plugins that are tried at once: most start in no time, those that hang wait


class Offer(NamedTuple):
    """A backend, and what it said of itself when it was asked: once, as it may say two things."""

    kind: str
    name: str
    backend: Backend


@dataclass(frozen=True)
class Source:
    """An entry point with the metadata of its distribution; `flaw` says why that is unreadable."""

    entry_point: importlib.metadata.EntryPoint
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    flaw: str | None = None

    @classmethod
    def of(cls, entry_point: importlib.metadata.EntryPoint) -> Source:
        dist = entry_point.dist
        try:
            name, version = dist.name, dist.version  # type: ignore[union-attr]
            requires = tuple(dist.requires or ())  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - half-removed distributions raise many things
            name = version = None
        if name and version:
            return cls(entry_point, name, version, requires)
        where = f" in {dist.locate_file('')}" if dist is not None else ""
        flaw = f"the metadata of its distribution{where} cannot be read: reinstall or remove it"
        return cls(entry_point, "unknown", "unknown", flaw=flaw)


def trials(sources: Sequence[Source], timeout: float) -> list[TrialResult | None]:
    """What each plugin does to a process; None: nobody asks, or no other process can be had.

    Those that are not of jackfield's own distribution are tried in processes of their own, side by
    side: a start of Python each, once, as long as what came out can be remembered.
    """

    def trial(source: Source) -> TrialResult | None:
        if _is_ours(source):
            return None
        try:
            check_readable(source)
        except PluginError:  # which `load` raises, too
            return None
        result = recall(source.entry_point, timeout)
        if result is None and (result := tried(source.entry_point, timeout)) is not None:
            remember(source.entry_point, result)
        return result

    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    try:
        return list(pool.map(trial, sources))
    except BaseException:  # Ctrl-C waits for nobody
        pool.shutdown(wait=False, cancel_futures=True)
        end_all()
        raise
    finally:
        pool.shutdown()


def _is_ours(source: Source) -> bool:
    return canonicalize_name(source.distribution) == DISTRIBUTION


def load(
    source: Source, timeout: float, result: TrialResult | None = None
) -> tuple[list[Offer], list[str]]:
    """Everything that a plugin offers, and what it did besides that was put right.

    `result` is that of its trial; None: it could not be tried, and all that it does is contained
    here. Raises PluginError, whatever the plugin does.
    """
    check_readable(source)
    if _is_ours(source):
        return within(timeout, source), []
    if result is not None and result.refused:
        raise PluginError(f"{result.refused}, in a process of its own{_again(source)}")
    try:
        with _as_known(result) as seen:
            offers = within(timeout, source)
        return offers, seen.problems
    except _HangError as error:
        remember(source.entry_point, TrialResult(str(error), seconds=float(timeout)))
        raise PluginError(f"{error}{_again(source)}") from None


def _as_known(result: TrialResult | None) -> AbstractContextManager[Seen]:
    """Contains what the plugin is known to do; all, where it could not be tried."""
    return contained() if result is None else contained(result.changes, writes=result.writes)


def _again(source: Source) -> str:
    path = path_of(source.entry_point)
    return f"; delete {path} to have it tried again" if path and path.is_file() else ""


class _HangError(PluginError):
    """It did not come back in time."""


def check_readable(source: Source) -> None:
    """Refuse a plugin of which too little is known, or that needs another jackfield."""
    if source.flaw:
        raise PluginError(source.flaw)
    check_version_contract(source)


def check_version_contract(source: Source) -> None:
    """Refuse a plugin that needs another jackfield, before any of its code runs."""
    if _is_ours(source):
        return
    here = importlib.metadata.version(DISTRIBUTION)
    for text in source.requires:
        if not text.strip().lower().startswith(DISTRIBUTION):
            continue
        try:
            requirement = Requirement(text)
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": ""})
        except Exception as error:
            raise PluginError(f"its requirement {text!r} cannot be read: {error}") from error
        if canonicalize_name(requirement.name) != DISTRIBUTION or not applies:
            continue
        if not requirement.specifier.contains(here, prereleases=True):
            raise PluginError(
                f"needs jackfield{requirement.specifier}, this is jackfield {here}: "
                f"upgrade one of the two"
            )


def within(timeout: float, source: Source) -> list[Offer]:
    """Load in a thread, so that a plugin that hangs is reported, not waited for.

    BaseException, because a plugin that calls sys.exit() must not end its host.
    """
    outcome: list[list[Offer] | BaseException] = []
    what = f"loading {source.entry_point.value}"

    def run() -> None:
        loads()
        try:
            outcome.append(_collect(_import(source), source))
        except BaseException as error:  # noqa: BLE001 - see above
            outcome.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        _stop(thread)
        raise _HangError(f"{what} did not end within {timeout:g} s")
    (result,) = outcome
    if isinstance(result, PluginError):
        raise result
    if isinstance(result, BaseException):
        raise PluginError(f"{what} failed: {error_text(result)}") from result
    return result


def _stop(thread: threading.Thread) -> None:
    """End a loop of Python's, which would keep a core busy; who waits for something goes on to."""
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )
    thread.join(0.2)


def _import(source: Source) -> Any:
    entry_point = source.entry_point
    try:
        return entry_point.load()
    except ModuleNotFoundError as error:
        if error.name and f"{entry_point.module}.".startswith(f"{error.name}."):
            raise PluginError(
                f"its entry point names the module {entry_point.module}, which does not exist: the "
                f"installed metadata is stale, reinstall {source.distribution}"
            ) from error
        raise PluginError(f"import failed: {error_text(error)}") from error
    except BaseException as error:
        raise PluginError(f"import failed: {error_text(error)}") from error


def _collect(module: Any, source: Source) -> list[Offer]:
    """What `module` offers through its hooks."""
    manager = pluggy.PluginManager("jackfield")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, source.entry_point.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        lines = " ".join(str(error).split())  # pluggy's own text
        raise PluginError(_misspelt(manager, module) or lines) from error
    hooks = {
        kind: impl.function
        for kind, hook in HOOKS.items()
        for impl in getattr(manager.hook, hook).get_hookimpls()
    }
    if not hooks:
        raise PluginError(
            f"{source.entry_point.value} implements no hook: none of {', '.join(HOOKS.values())} "
            "is there and marked with @jackfield.hookimpl"
        )
    offers = [offer for kind, hook in hooks.items() for offer in _ask(hook, kind)]
    if not offers:
        raise PluginError(
            f"{', '.join(HOOKS[kind] for kind in hooks)} of {source.entry_point.value} returned no "
            "backend; where this machine lacks something, say so in available()"
        )
    return offers


def _misspelt(manager: pluggy.PluginManager, module: Any) -> str | None:
    for hook in manager.get_hookcallers(module) or []:
        if not hook.has_spec():
            return f"there is no hook {hook.name!r}{nearest(hook.name, HOOKS.values())}"
    return None


def _ask(hook: Callable[[], Any], kind: str) -> list[Offer]:
    name, contract = HOOKS[kind], CONTRACTS[kind]
    try:
        backends = hook()
    except BaseException as error:
        raise PluginError(f"hook {name} raised {error_text(error)}") from error
    if not isinstance(backends, list | tuple):
        raise PluginError(f"hook {name} must return a list of backends, got {quoted(backends)}")
    offers = []
    for backend in backends:
        if not isinstance(backend, contract):
            raise PluginError(
                f"hook {name} must return instances of {contract.__name__}, got {quoted(backend)}"
            )
        flaws = [] if backend.kind == kind else [f"`kind` is {kind!r}, not {backend.kind!r}"]
        if flaws := flaws + backend.flaws():
            raise PluginError(f"{type(backend).__name__} from hook {name}: {'; '.join(flaws)}")
        offers.append(Offer(kind, _plain(backend.name), backend))
    return offers


def _plain(name: Any) -> str:
    """A name that was found right, as it is now. PluginError where it says something else."""
    if type(name) is not str or not NAME.fullmatch(name):
        raise PluginError(f"`name` must stay the plain string that it was, not {quoted(name)}")
    return name

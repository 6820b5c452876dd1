"""Which backends there are: what discovery found, looked up by kind and name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from packaging.utils import canonicalize_name

from jackfield.contracts import Backend, BindContext, GivenConfig
from jackfield.errors import JackfieldError, SelectionError, quoted
from jackfield.guarded import fault, guarded
from jackfield.hookspecs import HOOKS
from jackfield.registry.loading import DISTRIBUTION
from jackfield.spelling import PREFIX, Selection, make_options, nearest

logger = logging.getLogger("jackfield")

State = Literal["loaded", "failed", "disabled"]


@dataclass(frozen=True)
class PluginRecord:
    """One entry point and what became of it.

    `cause` says why it failed or was left out; `problems` are faults of a plugin that loaded
    (a name that another one claims too). `backends` are "kind:name".
    """

    entry_point: str
    module: str
    distribution: str
    version: str
    state: State
    cause: str | None = None
    problems: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "entry_point": self.entry_point,
            "module": self.module,
            "distribution": self.distribution,
            "version": self.version,
            "state": self.state,
            "cause": self.cause,
            "problems": list(self.problems),
            "backends": list(self.backends),
        }


@dataclass(frozen=True)
class Registered:
    """A backend and where it came from.

    `name` is what the backend said when it was loaded. `bare`: it may be had by that name alone,
    which a stranger's backend that is called like one of jackfield's own may not.
    """

    backend: Backend
    distribution: str
    version: str
    entry_point: str
    name: str = ""
    bare: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.backend.name)

    @property
    def kind(self) -> str:
        return self.backend.kind

    @property
    def own(self) -> bool:
        """Whether it comes with jackfield itself."""
        return canonicalize_name(self.distribution) == DISTRIBUTION

    def ask(self, what: str, *arguments: Any) -> Any:
        """What the backend's own method `what` returns. Raises PluginError where it breaks."""
        with guarded(self, what):
            return getattr(self.backend, what)(*arguments)

    def size(self, what: str, *arguments: Any) -> int | None:
        """Bytes that it is asked for; None where it does not say, or its own code breaks."""
        try:
            found = self.ask(what, *arguments)
        except JackfieldError as error:
            _warn_once(f"{error}: sizes are told without it")
            return None
        return found if type(found) is int and found >= 0 else None

    def options(self, arguments: Mapping[str, str] = MappingProxyType({})) -> Any:
        """Its options from texts. Raises what `make_options` raises."""
        return make_options(self.backend.options, arguments, self)

    def bind(self, context: BindContext) -> Any:
        """What the backend returns for `context`. Raises PluginError where its code breaks."""
        bound = self.ask("bind", context)
        if not isinstance(bound, self.backend.bound):
            wanted = " or ".join(cls.__name__ for cls in self.backend.bound)
            raise fault(self, f"bind must return a {wanted}, got {quoted(bound)}")
        return bound

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"


@dataclass(frozen=True)
class Choice:
    """The backend chosen for a kind, its checked options, and how it came to be chosen."""

    registered: Registered
    options: Any
    how: str  # "named", "auto" or "fallback"

    @property
    def backend(self) -> Any:
        return self.registered.backend

    @property
    def query(self) -> str:
        """The options that are not the usual ones, as a selection spells them; "" for none."""
        if isinstance(self.options, GivenConfig):
            return ""
        try:
            usual = asdict(self.registered.options())
        except JackfieldError:  # it needs an option
            usual = {}
        own = {
            name: str(value).lower() if isinstance(value, bool | None) else str(value)
            for name, value in asdict(self.options).items()
            if value != usual.get(name)
        }
        return str(Selection("x", None, own)).partition("?")[2]

    def __str__(self) -> str:
        """As a line of a plan has it: `gguf?activations=int8 (named), jackfield 0.1.0`."""
        r, query = self.registered, self.query
        return f"{r.name}{query and '?'}{query} ({self.how}), {r.distribution} {r.version}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.registered.name,
            "distribution": self.registered.distribution,
            "version": self.registered.version,
            "options": self.options.to_dict()
            if isinstance(self.options, GivenConfig)
            else asdict(self.options),
            "how": self.how,
        }


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


@dataclass
class Registry:
    """Every backend that was found, and a record of every plugin, also of those that failed."""

    backends: dict[str, list[Registered]] = field(default_factory=lambda: {k: [] for k in HOOKS})
    plugins: list[PluginRecord] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    warned: bool = False

    def warn(self) -> None:
        """Log, once, which plugins are missing or at odds, other than by the caller's wish."""
        if self.warned:
            return
        self.warned = True
        for warning in self.warnings:
            logger.warning("%s", warning)
        for plugin in self.plugins:
            for trouble in (plugin.cause, *plugin.problems):
                if trouble and plugin.state != "disabled":
                    who = f"{plugin.entry_point} of {plugin.distribution} {plugin.version}"
                    logger.warning("plugin %s: %s", who, trouble)

    def of_kind(self, kind: str) -> Iterator[Registered]:
        """The backends of `kind`, in a stable order (distribution, entry point, as offered)."""
        return iter(self.backends[kind])

    def find(self, kind: str, selection: Selection) -> Registered:
        """The one backend that `selection` names; SelectionError where there is none, or two."""
        named = [r for r in self._within(kind, selection) if r.name == selection.name]
        if selection.distribution is None:
            named = [r for r in named if r.bare]
        if len(named) == 1:
            return named[0]
        if named:
            who = " and ".join(f"{r.distribution} {r.version}" for r in named)
            how = " or ".join(f"'{PREFIX}{r.distribution}/{r.name}'" for r in named)
            raise SelectionError(f"{kind} {selection.name!r} is offered by {who}; say which: {how}")
        raise SelectionError(self._unknown(kind, selection))

    def address(self, registered: Registered) -> str:
        """The shortest selection that means `registered` and no other."""
        same = [r for r in self.of_kind(registered.kind) if r.name == registered.name and r.bare]
        where = "" if same == [registered] else f"{registered.distribution}/"
        return f"{PREFIX if where else ''}{where}{registered.name}"

    def _within(self, kind: str, selection: Selection) -> list[Registered]:
        """The backends of `kind`; where a distribution is named, only its own."""
        if selection.distribution is None:
            return list(self.of_kind(kind))
        wanted = canonicalize_name(selection.distribution)
        return [r for r in self.of_kind(kind) if canonicalize_name(r.distribution) == wanted]

    def _unknown(self, kind: str, selection: Selection) -> str:
        if not self.backends[kind]:
            return (
                f"no plugin offers any {kind} backend, so {str(selection)!r} cannot be had; the "
                "built-in ones come with `pip install jackfield` (see `jackfield doctor`)"
            )
        where = selection.distribution
        known = sorted({r.name for r in self._within(kind, selection)})
        if where and not known:
            owners = sorted({r.distribution for r in self.of_kind(kind)})
            return (
                f"no distribution {where!r} offers any {kind} (those that do: "
                f"{', '.join(owners)}){nearest(where, owners)}"
            )
        named = [r for r in self._within(kind, selection) if r.name == selection.name]
        if named:  # only those that are not to be had by their name alone
            how = " or ".join(f"'{PREFIX}{r.distribution}/{r.name}'" for r in named)
            return (
                f"the {kind} {selection.name!r} of jackfield is not there (see `jackfield "
                f"plugins`), and nobody else's stands in for it; another of that name is {how}"
            )
        source = f" in distribution {where!r}" if where else ""
        message = f"there is no {kind} {selection.name!r}{source} (known: {', '.join(known)})"
        message += nearest(selection.name, known)
        elsewhere = [k for k in HOOKS if any(r.name == selection.name for r in self.of_kind(k))]
        if elsewhere and kind not in elsewhere:
            message += f"; {selection.name!r} is of kind {elsewhere[0]}"
        for state, what in (("failed", "failed to load"), ("disabled", "are disabled")):
            if number := sum(p.state == state for p in self.plugins):
                message += f"; {number} plugin(s) {what}, see `jackfield plugins`"
        return message

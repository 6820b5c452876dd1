"""A call into a plugin's code: what it raises is reported as that plugin's, in one wording.

    with guarded(registered, "forward"):
        output = forward(...)

The message is ``attention 'x' of dist 1.2: forward raised ValueError: ...``, on one line, with the
cause chained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import get_ident
from types import TracebackType

from jackfield.errors import JackfieldError, PluginError, error_text, first_line

logger = logging.getLogger("jackfield")

#: thread -> the guards it is within, the innermost last
_open: dict[int, list[guarded]] = {}


class guarded:  # noqa: N801 - reads as a word of the language
    """While it is open, a plugin's code runs: `what`, of the backend that `who` names as a string.

    Raises PluginError for whatever that code raises, also for SystemExit and what cannot be told.
    An error of our own tree keeps its type and is reported as the plugin's too, once: by the
    innermost of several guards. KeyboardInterrupt, which is the user's, goes through. Costs a
    fraction of a microsecond; a guard can be entered any number of times, also from several
    threads.
    """

    __slots__ = ("layer", "what", "who")

    def __init__(self, who: object, what: str) -> None:
        self.who = who
        self.what = what
        self.layer: int | None = None  # of the model, where the call is one layer's

    def __enter__(self) -> None:
        _open.setdefault(get_ident(), []).append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _open[get_ident()].pop()
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        if not isinstance(error, JackfieldError):
            raise fault(self.who, f"{self.what} raised {error_text(error)}") from error
        if error.plugin is None:
            error.plugin = str(self.who)
            error.args = (f"{self.who}: {first_line(error)}",)


def plugin_call_of(thread: int | None) -> str | None:
    """Which call into a plugin a thread is inside of now, the innermost one; None: none."""
    guards = _open.get(thread or 0)
    if not guards:
        return None
    guard = guards[-1]
    where = "" if guard.layer is None else f" of layer {guard.layer}"
    return f"{guard.who}: {guard.what}{where}"


def all_of(acts: Iterable[Callable[[], object]]) -> None:
    """Do each of `acts`, also where one before it raises: whatever is held must be given back.

    Raises what the first raised; what others did is logged.
    """
    first: BaseException | None = None
    for act in acts:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - of plugins, mostly
            if first is not None:
                logger.error("giving back failed as well: %s", error_text(error))
            first = first or error
    if first is not None:
        raise first


def fault(who: object, what: str) -> PluginError:
    """The error of a plugin that breaks its contract, by doing `what`."""
    error = PluginError(f"{who}: {what}")
    error.plugin = str(who)
    return error

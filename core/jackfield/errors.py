"""The exception tree. Every message says what was asked, what is so, and what to do.

JackfieldError                 exit code 1: a failure
├── UsageError                 exit code 2: the caller can mend it
│   ├── SelectionError         a backend's name: unknown, ambiguous, malformed
│   ├── OptionError            an option of a selection: unknown, wrong type
│   ├── PlanError              no combination of backends can do the job
│   ├── SettingsError          a generation setting: invalid, or not honoured
│   ├── PromptError            a prompt: empty, too long, needs a tokenizer
│   ├── CacheFullError         the cache is smaller than the requests
│   └── CheckpointError        a model folder or hub id: missing, broken, unsafe
├── QueueFullError             more requests wait than the engine was told to keep
├── PluginError                a plugin broke its contract
└── ExecutionError             the model or a backend failed while running
    └── RanksError             processes that share a model have lost one another
"""

from __future__ import annotations

import os
import reprlib
from pathlib import Path

__all__ = [
    "CacheFullError",
    "CheckpointError",
    "ExecutionError",
    "JackfieldError",
    "OptionError",
    "PlanError",
    "PluginError",
    "PromptError",
    "QueueFullError",
    "RanksError",
    "SelectionError",
    "SettingsError",
    "UsageError",
    "error_text",
    "first_line",
    "quoted",
    "shown",
    "unusable_folder",
]

_NESTED = 100  # folders; Python makes them by recursion
LONGEST = 10_000  # characters of a message, whatever a plugin or a library puts into it

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 12
_short.maxstring = _short.maxother = 120


def shown(foreign: object, most: int = 200) -> str:
    """What a file, a library or a plugin says, as a part of a message: one line of at most `most`
    characters and "…", with escapes for what no terminal shows (line ends, control characters,
    half surrogate pairs).
    """
    text = str(foreign)
    cut = text if len(text) <= most else f"{text[:most]}…"
    if cut.isprintable():
        return cut
    escaped = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
    return escaped if len(escaped) <= most + 1 else f"{escaped[:most]}…"


def first_line(error: BaseException) -> str:
    """An error's text up to the end of its first sentence, for use inside a message of ours."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an exception of whoever it was
        return "(its text cannot be made)"
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return shown(f"{lines[0]} {lines[1]}", 400)
    return shown(lines[0], 400) if lines else type(error).__name__


def error_text(error: BaseException) -> str:
    """The type of an error and its `first_line`, for a message of ours: ``ValueError: no``."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def quoted(value: object) -> str:
    """A value of whoever it is as a part of a message: its `repr`, short, on one line.

    Also where its `repr` is broken.
    """
    try:
        return shown(" ".join(_short.repr(value).split()))
    except BaseException:  # noqa: BLE001 - a stranger's own __repr__
        return f"a {type(value).__name__}"


class JackfieldError(Exception):
    """The root of every error that jackfield raises on purpose. Its text is one clean line.

    `plugin` says whose code raised or caused it: kind, name, distribution and version.
    """

    exit_code = 1
    plugin: str | None = None

    def __str__(self) -> str:
        return shown(super().__str__(), LONGEST)


class UsageError(JackfieldError):
    """The caller asked for something that cannot be; the message says what to do."""

    exit_code = 2


class SelectionError(UsageError):
    """A backend's name is unknown, ambiguous or malformed."""


class OptionError(UsageError):
    """An option in a selection is unknown or has the wrong type."""


class PlanError(UsageError):
    """No combination of backends fits; the message carries every reason."""


class SettingsError(UsageError):
    """A generation setting is invalid, or the chosen backends do not honour it."""


class PromptError(UsageError):
    """A prompt cannot be fed to this model."""


class CheckpointError(UsageError):
    """A model folder or hub id cannot be loaded, or must not be."""


class QueueFullError(JackfieldError):
    """As many requests wait as the engine was told to keep; later there is room again."""


class PluginError(JackfieldError):
    """A plugin broke the contract of its kind."""


class CacheFullError(UsageError):
    """The cache that was asked for cannot hold what was asked of it."""


class ExecutionError(JackfieldError):
    """The model or a backend failed while running; the cause is chained."""


class RanksError(ExecutionError):
    """One of the processes that share a model has ended or failed; its engine cannot go on."""


def unusable_folder(error: BaseException) -> UsageError | None:
    """What to say of an error by which torch, while it is imported, makes no folder of its own.

    torch makes the one for what it compiles as soon as transformers is imported, whatever is asked;
    transformers' own error may follow from it. None: it is about something else.
    """
    variable = "TORCHINDUCTOR_CACHE_DIR"
    named = os.environ.get(variable, "")
    cause: BaseException | None = error
    while named and cause is not None:
        if (why := _why_unusable(cause, named)) is not None:
            return UsageError(
                f"{variable}={quoted(named)} is no folder that torch can use ({why}); set it to "
                "one that can be written, or unset it"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _why_unusable(error: BaseException, named: str) -> str | None:
    """Why this error says that the folder `named` cannot be made; None: it does not."""
    parents = Path(named).parents
    if isinstance(error, RecursionError) and len(parents) > _NESTED:
        return f"{len(parents)} folders inside of one another"
    if isinstance(error, OSError) and error.filename in (named, *map(str, parents)):
        return error.strerror
    return None

"""What a stage found, a line of JSON each, written at once so that a cut loses nothing."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

Values = dict[str, Any]

LOST = 3  # exit status of a stage whose GPU answers no more, after an illegal access for example


class SkippedError(Exception):
    """The check cannot be made here; the message says why."""


class Results:
    """Writes the results of one stage. `ok` of one: True, False, or None where it was skipped.

    `met` says whether an aim of speed was met, which is not the same as being right. `made` are
    the checks of a process before this one; `begin` is told of each check before it is made, and
    `lost` says whether none can be made any more.
    """

    def __init__(
        self,
        stage: str,
        write: Callable[[Values], None],
        *,
        made: Collection[str] = (),
        begin: Callable[[str], object] = str,
        lost: Callable[[], bool] = bool,
    ) -> None:
        self.stage = stage
        self.made = made
        self._write = write
        self._begin = begin
        self._lost = lost

    def note(self, check: str, ok: bool | None = True, **values: Any) -> None:
        self._write({"stage": self.stage, "check": check, "ok": ok, **values})

    def run(self, name: str, act: Callable[..., Values], *given: Any) -> None:
        """A check of what `act` returns; none where it was made before."""
        if name not in self.made:
            with self.check(name) as found:
                found.update(act(*given))

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Values]:
        """What is put into the dict is noted; whatever is raised is a result as well.

        Out of device memory included: the stage goes on with the next check. Raises SystemExit
        where the GPU is lost to this process: another one goes on.
        """
        self._begin(name)
        values: Values = {}
        started = time.perf_counter()
        ok: bool | None = True
        try:
            yield values
            ok = values.pop("ok", True)
        except SkippedError as reason:
            ok = None
            values["reason"] = str(reason)
        except Exception as error:  # noqa: BLE001 - a stage outlives its checks
            ok = False
            values["error"] = brief(error)
            values["where"] = traceback.format_exc().splitlines()[-12:]
        values["seconds"] = round(time.perf_counter() - started, 3)
        self.note(name, ok, **values)
        if ok is False and self._lost():
            raise SystemExit(LOST)


def brief(error: BaseException) -> str:
    """The type and the first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:400] if text else ''}"


def appending(path: Path) -> Callable[[Values], None]:
    """Writes to the end of a file, and a short line for people to standard output."""

    def write(record: Values) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")
        print(line_of(record), flush=True)

    return write


_SILENT = {"stage", "check", "ok", "seconds", "where", "profile", "found"}
_MARKS = {True: "ok", False: "FAILED", None: "skipped"}


def line_of(record: Values) -> str:
    said = ", ".join(f"{k} {short(v)}" for k, v in record.items() if k not in _SILENT)
    return f"  {_MARKS[record['ok']]:8}{record['check']}" + (f": {said}" if said else "")


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read(path: Path) -> list[Values]:
    """All whole lines; the last one may have been cut in the middle."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found

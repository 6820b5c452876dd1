"""One check of a backend, and its verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jackfield.errors import JackfieldError, error_text, shown

Outcome = Literal["passed", "failed", "refused", "not tried"]


class WrongError(AssertionError):
    """What a backend did wrong, in one line: what was asked, what came, what is right."""


class NotTriedError(Exception):
    """Why a check cannot be made here: a device or a library that is missing."""


@dataclass(frozen=True)
class Check:
    """One thing that a backend must do, or must refuse.

    Attributes:
        name: Dotted, unique in a suite: "packed.decode.sliding_window".
        capability: What it proves, in the contract's words: "features: sliding_window", "layouts:
            packed"; "contract" for what every backend of the kind must do.
        run: Called with each of `cases`. Returns a remark ("at most 3e-7 off") or None. Raises
            WrongError where the backend is wrong, NotTriedError where it cannot be tried here;
            whatever else it raises is the backend's failure too.
        cases: From the smallest up; the first that fails is told. Their `str` is shown.
        refusal: The backend does not declare the capability, and `run` expects that it is refused.
        limit: Seconds that all cases may take.
        large: So much is computed that Triton's interpreter would take minutes.
    """

    name: str
    capability: str
    run: Callable[[Any], str | None]
    cases: Sequence[Any] = ("",)
    refusal: bool = False
    limit: float = 60.0
    large: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a check.

    Attributes:
        outcome: "passed"; "failed"; "refused": it is not declared, and refused as it has to be;
            "not tried", with the reason.
        message: What was wrong, why it was not tried, or a remark.
        case: The smallest case that failed; "" where there is one only.
        seconds: What it took.
        trace: The last lines of the traceback of an error that nobody expected; "" otherwise.
    """

    name: str
    capability: str
    outcome: Outcome
    message: str = ""
    case: str = ""
    seconds: float = 0.0
    trace: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdict(check: Check) -> Verdict:
    """Run a check in this thread. What it leaves changed of torch is a failure, and put back."""
    # Imports torch, which a report does not need.
    from jackfield.testing.torch_settings import TorchSettings

    settings = TorchSettings()
    found = _verdict(check)
    changed = settings.put_back()
    if changed and found.outcome in ("passed", "refused"):
        return replace(found, outcome="failed", message=f"leaves {', '.join(changed)} changed")
    return found


def _verdict(check: Check) -> Verdict:
    begin, remark = time.perf_counter(), None

    def told(outcome: Outcome, message: str, case: object = "", trace: str = "") -> Verdict:
        took = time.perf_counter() - begin
        return Verdict(check.name, check.capability, outcome, message, str(case), took, trace)

    for case in check.cases:
        try:
            remark = check.run(case) or remark
        except NotTriedError as error:
            return told("not tried", shown(error))
        except WrongError as error:
            return told("failed", shown(error, 600), case)
        except JackfieldError as error:
            return told("failed", shown(error, 600), case)
        except Exception as error:  # noqa: BLE001 - a stranger's code
            lines = traceback.format_exception(error, limit=-6)
            return told("failed", f"raised {error_text(error)}", case, "".join(lines))
    return told("refused" if check.refusal else "passed", remark or "")


def not_there(check: Check, message: str) -> Verdict:
    """The verdict of a check that never came back."""
    return Verdict(check.name, check.capability, "failed", message)


def failures(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return [one for one in verdicts if one.outcome == "failed"]

"""What may follow in one sequence whose text must look like something, and after its drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from jackfield.requests.text_errors import failed


class Constraint:
    """What may follow in one sequence. Grows with it; the next request gets one of its own."""

    def __init__(self, matcher: Any, kind: str, ends: tuple[int, ...], *, may_end: bool) -> None:
        self.matcher = matcher
        self.kind = kind
        self.failure: str | None = None  # the error that it ends with
        self.ends = ends  # the EOS tokens that the matcher knows
        self.may_end = may_end  # whether the request knows them, too

    def copy(self) -> Constraint:
        """One that goes on from here by itself."""
        return Constraint(self.matcher.deep_copy(), self.kind, self.ends, may_end=self.may_end)

    def advance(self, tokens: Seq[int]) -> int | None:
        """The sequence grows by `tokens`; None, or how many of them there are before its end."""
        for count, token in enumerate(tokens, 1):
            self.matcher.consume_token(token)
            if self.matcher.is_stopped():
                return count
        return None

    @property
    def error(self) -> str | None:
        """Why nobody knows what may follow (it costs too much to find out), as the error of the
        request; None: all is well.
        """
        if self.failure is None and self.matcher.is_error():
            self.failure = self.failed(broken(self.matcher.get_error()))
        return self.failure

    def failed(self, why: str) -> str:
        """The error of the request where it cannot go on."""
        return failed("structure", f"{self.kind}: {why}")

    def closed(self, drafts: Seq[int]) -> list[int]:
        """After how many of `drafts` none of its ends may follow.

        A grammar may name tokens, an end among them; one would end the text before it is whole.
        """
        if not self.may_end:
            return list(range(len(drafts) + 1))
        if self.kind != "grammar":
            return []
        found, matcher = [], self.matcher
        for count, draft in enumerate([*drafts, None]):
            if not matcher.is_accepting():
                found.append(count)
            if draft is None or not (matcher := matcher.deep_copy()).try_consume_tokens([draft]):
                break
        return found


class Wanted(NamedTuple):
    """A text whose next tokens are wanted, of which request, and the drafts that are tried."""

    request: int
    constraint: Constraint
    drafts: Seq[int] = ()


def broken(error: str) -> str:
    """What llguidance says, in one line: its last sentence about the cause."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines or ["its grammar costs too much"])[0][:300]

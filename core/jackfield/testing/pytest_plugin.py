"""``pytest --jackfield-backend plugin:NAME``: every check of a backend is a test.

pytest loads this module in every run where jackfield is installed, so it imports nothing before it
is asked for. Give the option several times for several backends; ``kind:plugin:NAME`` where
backends of several kinds have that name.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jackfield.testing.checks import Check

_GIVEN = re.compile(r"(?:(?!plugin:)(?P<kind>[a-z]+):)?(?P<selection>.*)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("jackfield").addoption(
        "--jackfield-backend",
        action="append",
        default=[],
        metavar="plugin:NAME",
        help="Check what this installed backend declares; repeatable. See `jackfield check`.",
    )


@pytest.hookimpl(tryfirst=True)  # before `-k` and the like look at the items
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    for given in session.config.getoption("--jackfield-backend"):
        node = BackendNode.from_parent(session, name=given)
        items.extend(node.collect())


class BackendNode(pytest.Collector):
    """The checks of one backend."""

    def collect(self) -> Iterable[CheckItem]:
        from jackfield.errors import JackfieldError
        from jackfield.testing.subject import subject_of
        from jackfield.testing.suites import checks_of

        match = _GIVEN.fullmatch(self.name)
        if match is None:
            raise pytest.UsageError(f"--jackfield-backend takes plugin:NAME, not {self.name!r}")
        folder = tempfile.TemporaryDirectory(prefix="jackfield-check-")
        self.config.add_cleanup(folder.cleanup)
        try:
            subject = subject_of(match["selection"], match["kind"], Path(folder.name))
            checks = checks_of(subject)
        except JackfieldError as error:
            raise pytest.UsageError(f"--jackfield-backend {self.name}: {error}") from None
        return [CheckItem.from_parent(self, name=check.name, check=check) for check in checks]


class CheckItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Check, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        from jackfield.testing.checks import verdict

        found = verdict(self.check)
        if found.outcome == "not tried":
            pytest.skip(found.message)
        if found.outcome == "failed":
            raise FailedCheck(found.message, found.case, found.trace)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, FailedCheck):
            return super().repr_failure(excinfo, style)
        message, case, trace = excinfo.value.args
        lines = [f"{self.parent.name if self.parent else ''} {self.name}: {message}"]
        lines += [f"smallest case: {case}"] if case else []
        return "\n".join([*lines, trace]).rstrip()

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(self.config.rootpath), None, f"{self.check.capability} [{self.name}]"


class FailedCheck(Exception):  # noqa: N818 - it is a verdict
    """A check that failed: message, case, trace."""

"""``pytest --jackfield-backend plugin:NAME``: every check of a backend is a test; and
``pytest --jackfield-bench plugin:NAME``: how fast it is (`benchmark_items.py`).

pytest loads this module in every run where jackfield is installed, so it imports nothing before it
is asked for. Give the option several times for several backends; ``kind:plugin:NAME`` where
backends of several kinds have that name. A test file of its own asks for them by a marker:

    @pytest.mark.jackfield_backend("plugin:NAME", kind="attention")
    def test_declared(jackfield_check):
        jackfield_check()
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
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
    parser.getgroup("jackfield").addoption(
        "--jackfield-bench",
        action="append",
        default=[],
        metavar="plugin:NAME",
        help="Measure this installed backend beside auto, with pytest-benchmark; repeatable.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "jackfield_backend(selection, kind=None): whose checks the fixture jackfield_check makes",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "jackfield_check" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("jackfield_backend")
    if marker is None:
        raise pytest.Collector.CollectError(
            f"{metafunc.definition.name} takes jackfield_check and does not say of what: put "
            "@pytest.mark.jackfield_backend('plugin:NAME') on it"
        )
    try:
        checks = _checks(metafunc.config, *marker.args, **marker.kwargs)
    except pytest.UsageError as error:  # of one file; the others go on
        raise pytest.Collector.CollectError(str(error)) from None
    names = [check.name for check in checks]
    metafunc.parametrize("jackfield_check", checks, ids=names, indirect=True)


@pytest.fixture
def jackfield_check(request: pytest.FixtureRequest) -> Callable[[], None]:
    """One check of the backend that the test's marker `jackfield_backend` names; a test each."""

    def run() -> None:
        __tracebackhide__ = True
        try:
            _run(request.param)
            return
        except FailedCheck as failed:
            told = failed.told()
        pytest.fail(told, pytrace=False)  # here, where it is not shown as raised while handling

    return run


@pytest.hookimpl(tryfirst=True)  # before `-k` and the like look at the items
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    for given in session.config.getoption("--jackfield-backend"):
        node = BackendNode.from_parent(session, name=given)
        items.extend(node.collect())
    for given in session.config.getoption("--jackfield-bench"):
        from jackfield.testing.benchmark_items import BenchmarkNode

        items.extend(BenchmarkNode.from_parent(session, name=given).collect())


class BackendNode(pytest.Collector):
    """The checks of one backend."""

    def collect(self) -> Iterable[CheckItem]:
        match = _GIVEN.fullmatch(self.name)
        if match is None:
            raise pytest.UsageError(f"--jackfield-backend takes plugin:NAME, not {self.name!r}")
        checks = _checks(self.config, match["selection"], match["kind"])
        return [CheckItem.from_parent(self, name=check.name, check=check) for check in checks]


def _checks(config: pytest.Config, selection: str, kind: str | None = None) -> list[Check]:
    from jackfield.errors import JackfieldError
    from jackfield.testing.subject import subject_of
    from jackfield.testing.suites import checks_of

    folder = tempfile.TemporaryDirectory(prefix="jackfield-check-")
    config.add_cleanup(folder.cleanup)
    try:
        return checks_of(subject_of(selection, kind, Path(folder.name)))
    except JackfieldError as error:
        raise pytest.UsageError(f"cannot check {selection}: {error}") from None


class CheckItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Check, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        _run(self.check)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, FailedCheck):
            return super().repr_failure(excinfo, style)
        return f"{self.parent.name if self.parent else ''} {self.name}: {excinfo.value.told()}"

    def reportinfo(self) -> tuple[Path, None, str]:
        return Path(self.config.rootpath), None, f"{self.check.capability} [{self.name}]"


def _run(check: Check) -> None:
    """Raises FailedCheck, or skips where it cannot be tried here."""
    from jackfield.testing.checks import verdict

    found = verdict(check)
    if found.outcome == "not tried":
        pytest.skip(found.message)
    if found.outcome == "failed":
        raise FailedCheck(found.message, found.case, found.trace)


class FailedCheck(Exception):  # noqa: N818 - it is a verdict
    """A check that failed: message, case, trace."""

    def told(self) -> str:
        message, case, trace = self.args
        lines = [message, *([f"smallest case: {case}"] if case else []), trace]
        return "\n".join(lines).rstrip()

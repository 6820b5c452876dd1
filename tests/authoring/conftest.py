from __future__ import annotations

from pathlib import Path

import extras
import pytest


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder."""
    extras.needs("copier")


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every variant of a package, as it was written."""
    from written import write_all

    return write_all(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def site(packages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which all of them are installed."""
    from written import install

    return install(packages, tmp_path_factory.mktemp("site"))

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("copier", reason="needs jackfield[new]")


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

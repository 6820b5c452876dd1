"""Batch jobs need what a server needs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import extras
import pytest


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder."""
    extras.needs("fastapi", "prometheus_client", "pydantic_settings")


@pytest.fixture
def bounded() -> Iterator[Any]:
    """What sets how large a file may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

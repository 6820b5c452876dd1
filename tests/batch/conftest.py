"""Batch jobs need what a server needs."""

from __future__ import annotations

import extras


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder."""
    extras.needs("fastapi", "prometheus_client", "pydantic_settings")

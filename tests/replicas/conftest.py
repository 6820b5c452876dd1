"""Replicas need what a server needs; Ray itself only where a test says so."""

from __future__ import annotations

import extras


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder."""
    extras.needs("fastapi", "httpx", "openai", "prometheus_client", "pydantic_settings", "uvicorn")

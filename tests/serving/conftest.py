"""A server in a thread of this process, with the small model inside the package."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import extras
import pytest

if TYPE_CHECKING:
    from page_in_browser import Opened

NEEDED = ("fastapi", "openai", "prometheus_client", "pydantic_settings", "uvicorn")
HERE = extras.missing(*NEEDED) is None

if HERE:
    import openai
    from browser import Browser, chromium
    from page_in_browser import opener
    from served import Served, serving


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder."""
    extras.needs(*NEEDED)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One that the tests of a file ask; none may change it, and other files count engines."""
    with serving() as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start a server of a test's own: `serve(**settings)`."""
    before = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serving(**settings))
    hanging = [t for t in threading.enumerate() if t.name == "server" and t not in before]
    assert not hanging


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One that the tests of a file share."""
    with chromium() as made:
        yield made


@pytest.fixture
def opened(browser: Browser, server: Served) -> Opened:
    """`with opened() as page`: see `page_in_browser.opener`."""
    return opener(browser, server)

"""What the tests of the page do in it, over and over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from browser import PROGRAM, Browser, Page

if TYPE_CHECKING:
    from served import Served

    Opened = Callable[..., AbstractContextManager[Page]]

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")
SORT = "Sort these numbers: 41 7 88 23"
STORY = "Tell me a story"
ANSWERED = "document.querySelector('#turns article:last-child[aria-busy=false]')"
KEY = "document.querySelector('#key-row')"
LAST = "#turns article:last-child .text"


def opener(browser: Browser, server: Served) -> Opened:
    """`with opened() as page`: the page of `server`, or of another; at its end nothing has gone
    wrong in it (`quiet`), and it has asked its own server alone.
    """

    @contextmanager
    def opened(at: Served | None = None, *, quiet: bool = True, **how: Any) -> Iterator[Page]:
        url = (at or server).url
        with browser.page(**how) as page:
            page.open(url)
            page.until(f"document.querySelector('#model').value || !{KEY}.hidden")
            yield page
            assert [one for one in page.asked if not one.startswith(f"{url}/")] == []
            assert page.wrong == [] or not quiet

    return opened


def ask(page: Page, text: str) -> str:
    """The answer, whole."""
    page.fill("#question", text)
    page.click("#send")
    page.until(f"!document.querySelector('#empty') && {ANSWERED}")
    return page.text(LAST)


def streamed(*chunks: Any, done: bool = True) -> tuple[int, str, str]:
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return 200, "text/event-stream", "".join(events) + ("data: [DONE]\n\n" if done else "")


def said(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return {"choices": [choice | more], "usage": None}

"""The page in a real browser: it fits, can be read, needs no mouse; and how it is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from page_in_browser import ANSWERED, LAST, SORT, ask, needs_browser, said, streamed

from jackfield.serving import page as pages

if TYPE_CHECKING:
    from page_in_browser import Opened
    from served import Served


@needs_browser
def test_the_keyboard_is_enough(opened: Opened) -> None:
    with opened() as page:
        assert page.run("document.activeElement.id") == "question"
        page.write(SORT)
        page.press("Enter", shift=True)
        page.write("please")
        assert page.run("document.activeElement.value") == f"{SORT}\nplease"
        page.run("document.activeElement.value = ''")
        page.write(SORT)
        page.press("Enter")
        page.until(f"!document.querySelector('#empty') && {ANSWERED}")
        assert page.text(LAST) == "7 23 41 88"
        page.press("Tab")
        page.press("Tab")
        assert page.run("document.activeElement.id") == "again"
        page.press("Enter")
        assert page.run("document.activeElement.id") in ("question", "again")
        page.until(ANSWERED)
        controls = "[...document.querySelectorAll('button, input, select, textarea, summary')]"
        there = f"{controls}.filter((one) => !one.disabled && one.checkVisibility())"
        count = page.run(f"window.reached = new Set(), window.wanted = {there}, wanted.length")
        assert count > 12
        for _ in range(count + 4):
            page.press("Tab")
            page.run("reached.add(document.activeElement), 0")
        lost = page.run("wanted.filter((one) => !reached.has(one)).map((one) => one.outerHTML)")
        assert lost == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.one_in(4)
def test_the_page_fits_and_can_be_read(opened: Opened, width: int, dark: bool) -> None:
    with opened(width=width, height=800, dark=dark) as page:
        page.click("#logprobs")
        page.instead(
            "/v1/chat/completions",
            *streamed(
                said("Llanfair" * 60, logprobs={"content": [
                    {"token": "Llanfair" * 60, "logprob": -0.1, "top_logprobs": []}
                ]}),
                said("", finish_reason="stop"), {"error": {"message": "x" * 300}},
            ),
        )  # fmt: skip
        ask(page, "W" * 300)
        page.until("document.querySelector('#plan table')")
        page.run(
            "document.querySelectorAll('nav [aria-expanded=false]').forEach((one) => one.click()),"
            "document.querySelectorAll('details').forEach((one) => one.open = true)"
        )
        page.click(".token")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.querySelector('#turns').scrollWidth - turns.clientWidth") <= 0
        lowest, where = page.run(_CONTRAST)
        assert lowest >= 4.5, where
        page_is_dark = page.run(f"{_LIGHT}(getComputedStyle(document.body).backgroundColor)") < 0.2
        assert page_is_dark == dark
        nameless = [
            node["role"]["value"]
            for node in page.ask("Accessibility.getFullAXTree")["nodes"]
            if node.get("role", {}).get("value") in _CONTROLS
            and not node.get("name", {}).get("value")
        ]  # fmt: skip
        assert nameless == []


_CONTROLS = {"button", "checkbox", "combobox", "img", "region", "spinbutton", "textbox", "log"}
#: Relative luminance as WCAG 2 defines it.
_LIGHT = """((color) => {
  const [r, g, b] = color.match(/[0-9.]+/g).map((one) => one / 255)
    .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
})"""
#: The lowest contrast of a text with what is behind it, and which text.
_CONTRAST = f"""(() => {{
  const light = {_LIGHT};
  const behind = (one) => {{
    const color = getComputedStyle(one).backgroundColor;
    return /, 0\\)$/.test(color) && one.parentElement ? behind(one.parentElement) : color;
  }};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let lowest = [99, ""];
  while (walker.nextNode()) {{
    const text = walker.currentNode, one = text.parentElement;
    if (!text.data.trim() || !one.checkVisibility()) continue;
    if (one.closest(":disabled, noscript, .unseen")) continue;
    const both = [light(getComputedStyle(one).color), light(behind(one))];
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, one.outerHTML];
  }}
  return lowest;
}})()"""


def test_every_part_is_served_with_a_strict_policy(server: Served) -> None:
    folder = Path(pages.__file__).parent
    parts = ["/", *(f"/page/{f.name}" for f in folder.iterdir() if f.suffix in pages._KINDS)]
    parts.remove("/page/index.html")
    assert len(parts) > 5
    for part in parts:
        found = httpx.get(server.url + part)
        rules = found.headers["Content-Security-Policy"].split(";")
        policy = dict(rule.strip().split(" ", 1) for rule in rules)
        assert found.status_code == 200
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'", "'script'"}
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        assert "://" not in found.text.replace("http://www.w3.org/2000/svg", "")
    for gone in ("/page/", "/page/__init__.py", "/page/../app.py", "/page/index.html"):
        assert httpx.get(server.url + gone).status_code == 404


def test_the_page_can_be_turned_off(serve: Callable[..., Served]) -> None:
    url = serve(page=False, preload=False).url
    assert [httpx.get(url + path).status_code for path in ("/", "/page/main.js")] == [404, 404]

"""Takes docs/images/page-*.png: the page of a server with the demo model, in Chromium.

Run it after a change of the page: `python tools/serving_pictures.py` (wants Chromium and Pillow).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/images"
sys.path.insert(0, str(ROOT / "tests/serving"))

from browser import Page, chromium  # noqa: E402
from page_in_browser import SORT, STORY, ask  # noqa: E402
from served import serving  # noqa: E402


def save(page: Page, name: str) -> None:
    """A small file: of few colours, as pages are."""
    FOLDER.mkdir(exist_ok=True)
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    path = FOLDER / name
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    with serving() as server, chromium() as browser:
        with browser.page(1280, 860) as page:
            page.open(server.url)
            page.until("document.querySelector('#plan table')")
            for number in range(4):  # so that there is something to plot
                page.fill("#seed", str(number))
                page.fill("#temperature", "0.8")
                ask(page, STORY)
                page.run("new Promise((done) => setTimeout(done, 900))")
            page.click("#clear")
            page.click("#logprobs")
            page.fill("#max_completion_tokens", "32")
            ask(page, STORY)
            page.run("document.querySelectorAll('#turns details')[0].open = true")
            page.run("document.querySelectorAll('.token')[4].click()")
            save(page, "page-desktop-light.png")
        with browser.page(390, 780, dark=True) as page:
            page.open(server.url)
            page.until("document.querySelector('#plan table')")
            ask(page, SORT)
            ask(page, STORY)
            page.run("document.querySelectorAll('#turns details')[1].open = true, scrollTo(0, 1e5)")
            save(page, "page-phone-dark.png")


if __name__ == "__main__":
    main()

"""Takes docs/images/bench-page.png: the page of `jackfield bench --html` of a saved run.

Run it after a change of the page or of the run: `python tools/bench_picture.py` (wants Chromium and
Pillow).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ROOT / "docs/runs/sixteen-requests.json"
sys.path[:0] = [str(ROOT / "tests/serving"), str(ROOT / "tools")]

from browser import chromium  # noqa: E402
from serving_pictures import save  # noqa: E402

from jackfield.benchmarking.page import html  # noqa: E402
from jackfield.benchmarking.saved import read  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(html(read(RUN)), encoding="utf-8")
        with chromium() as browser, browser.page(1280, 1240) as page:
            page.open(file.as_uri())
            page.until("document.querySelector('svg')")
            save(page, "bench-page.png")


if __name__ == "__main__":
    main()

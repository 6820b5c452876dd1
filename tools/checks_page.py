"""Check every built-in and write the table of docs/checking.md: half a minute to minutes each.

    python tools/checks_page.py [KIND ...]     # reports go to build/checks and are kept
    python tools/checks_page.py --page         # the table alone, of the reports that are there

Exit code 1 where a check failed; its message is printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/checking.md"
REPORTS = ROOT / "build/checks"
BEGIN, END = "<!-- built-ins -->", "<!-- end of built-ins -->"
#: kind -> selections. What names a kernel of the hub, or a checkpoint's own method, has no default.
BUILT_INS = {
    "attention": ("sdpa", "eager", "cpu_decode", "flex_attention", "flash_attention_2", "triton"),
    "kernel": (
        "cpu-rms-norm", "onednn-linear", "upcast-linear", "triton-one-row", "triton-rms-norm",
        "triton-rotary",
    ),
    "cache": ("paged", "dynamic", "static", "quantized?backend=fp8", "offloaded"),
    "scheduler": ("fifo", "short-first"),
    "decoding": ("sample", "prompt_lookup", "assisted", "mtp", "beam"),
    "quantizer": (
        "none", "int4-cpu?group_size=32", "int4-cpu", "int8-cpu", "bnb-8bit", "bnb-4bit",
        "torchao", "torchao?type=int8-dynamic", "gguf", "gptq",
    ),
    "compiler": ("none", "inductor?backend=eager", "native", "cuda_graph"),
}  # fmt: skip


def check(kind: str, selection: str) -> dict[str, Any]:
    """The report of `jackfield check`."""
    command = ["jackfield", "check", f"plugin:{selection}", "--kind", kind, "--json"]
    done = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def file_of(kind: str, selection: str) -> Path:
    return REPORTS / f"{kind}-{re.sub('[^a-z0-9]+', '-', selection.lower())}.json"


def brief(message: str) -> str:
    """Why something was not tried: of a refusal what is in brackets, without advice."""
    reason = message.rpartition(" cannot run ")[2].partition(" here: ")[2].partition(" (")[2]
    reason = reason.split(": ")[0].split(", ")[0]
    return (reason or message).split("; ")[0]


def row(kind: str, selection: str, found: dict[str, Any]) -> str:
    counts = found["counts"]
    why = Counter(brief(v["message"]) for v in found["verdicts"] if v["outcome"] == "not tried")
    reasons = "; ".join(f"{count}: {reason}" for reason, count in why.most_common(2))
    rest = sum(why.values()) - sum(count for _, count in why.most_common(2))
    reasons += f"; {rest} more" if rest else ""
    cells = [f"{kind} `{selection}`", counts.get("passed", 0), counts.get("refused", "")]
    return f"| {' | '.join(map(str, [*cells, reasons]))} |"


def page() -> None:
    head = "| built-in | passed | refused | not tried, because |\n|---|---|---|---|"
    every = [(kind, one) for kind, selections in BUILT_INS.items() for one in selections]
    there = [pair for pair in every if file_of(*pair).is_file()]
    rows = [row(*pair, json.loads(file_of(*pair).read_text())) for pair in there]
    table = "\n".join([BEGIN, "", head, *rows, "", END])
    text = re.sub(f"{BEGIN}.*{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)


def main(asked: list[str]) -> None:
    failed = 0
    REPORTS.mkdir(parents=True, exist_ok=True)
    for kind in [] if asked == ["--page"] else asked or BUILT_INS:
        for selection in BUILT_INS[kind]:
            found = check(kind, selection)
            file_of(kind, selection).write_text(json.dumps(found))
            wrong = [v for v in found["verdicts"] if v["outcome"] == "failed"]
            failed += len(wrong)
            print(row(kind, selection, found), *(f"{v['name']}: {v['message']}" for v in wrong))
    page()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

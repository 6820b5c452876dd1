"""`docs/gpu.md`, made from the JSON of a run; without one it says that none has been made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpucheck.metadata import ROOT
from gpucheck.results import Values, short
from gpucheck.stages import STAGES

PAGE = ROOT / "docs" / "gpu.md"
KEPT = ROOT / "docs" / "gpu.json"  # the run that the page shows

INTRO = f"""\
# On a GPU

`make gpu` runs all that waits for a GPU, in less than ten minutes: what is there, whether kernels, engines and whole
models are right, what is counted (waits, compilations, memory), and how fast an 8-billion-parameter configuration
decodes. It needs Python, torch with CUDA, transformers and Triton, and no network; jackfield itself is used from the
checkout and need not be installed. What a machine lacks is skipped, with the reason. Each result is written to
`build/gpu/results.jsonl` the moment it is known, and after each stage all of them to `build/gpu/gpu.json`, so a run that is
cut short loses nothing; a stage whose process ends, or whose GPU answers it no more, goes on behind that check in a new
process. `python -m gpucheck --only decode-1` (with `PYTHONPATH=tests/gpu`) runs some of the stages, and
`--list` says what they are:

| stage | at most | what |
|---|---|---|
{chr(10).join(f"| `{s.name}` | {s.limit} s | {s.what} |" for s in STAGES)}

`generate_batch` runs without CUDA graphs here: that is what transformers does with an attention that has masks, as `sdpa` has.

`make gpu-page` writes this page from `build/gpu/gpu.json`. *Share of bandwidth*: the bytes that a step reads at least, over the bytes a
second that a large copy moves. *Times generate*: plain eager `generate` in turn with it. *Regret*: by how much the logit of a token that was
chosen is below the best one of plain transformers, which may be `bound` by rounding. *Host share*: of a profiled run, the part in which
the GPU has nothing to do; a profile slows what the host does, so it compares with nothing else.
"""
NOTHING = """
**No GPU has run it yet.** What is here was tested on processors: kernels under Triton's interpreter and compiled for three
generations of GPUs, everything else with stand-ins for CUDA. A test runs all code of `make gpu` with tiny models on a
processor.
"""
_TIMED = {
    "decode-1": "Decoding one sequence",
    "decode-32": "Decoding 32 sequences",
    "prefill": "Reading prompts",
}


def write(result: Path) -> int:
    """Keep a result beside the page and write the page from it."""
    text = result.read_text(encoding="utf-8")
    whole = json.loads(text)
    KEPT.write_text(text, encoding="utf-8")
    PAGE.write_text(page(whole), encoding="utf-8")
    return 0


def page(whole: Mapping[str, Any] | None) -> str:
    if whole is None:
        return INTRO + NOTHING
    results: list[Values] = whole["results"]
    parts = [INTRO, f"## {whole['gpu'] or 'No GPU'}, {whole['date']}\n", whole.get("note", "")]
    parts.append(machine(results))
    parts += [summary(whole["stages"], results), aims(results)]
    for name, title in _TIMED.items():
        parts.append(timed(title, [r for r in results if r["stage"] == name]))
    parts += [listing("Wrong", results, False), listing("Skipped", results, None)]
    return "\n".join(part for part in parts if part)


def machine(results: Iterable[Values]) -> str:
    """What was there, in a line."""
    wanted = ("host", "gpu", "libraries", "bandwidth")
    found = {r["check"]: r for r in results if r["stage"] == "machine" and r["check"] in wanted}
    skip = {"stage", "check", "ok", "seconds"}
    said = [
        f"{key} {short(value)}"
        for check in wanted
        for key, value in found.get(check, {}).items()
        if key not in skip
    ]
    return ", ".join(said) + ".\n"


def summary(stages: Iterable[Values], results: list[Values]) -> str:
    lines = ["| stage | ended | seconds | right | wrong | skipped |", "|---" * 6 + "|"]
    for stage in stages:
        own = [r["ok"] for r in results if r["stage"] == stage["stage"]]
        counts = " | ".join(str(own.count(ok)) for ok in (True, False, None))
        lines.append(f"| `{stage['stage']}` | {stage['ended']} | {stage['seconds']} | {counts} |")
    return "\n".join(lines) + "\n"


def aims(results: Iterable[Values]) -> str:
    lines = ["### Aims\n", "| stage | what | aim | met | found |", "|---" * 5 + "|"]
    for r in results:
        if r.get("aim"):
            figures = [f"{k} {short(v)}" for k, v in r.items() if isinstance(v, int | float)]
            shown = ", ".join(f for f in figures if not f.startswith(("ok ", "met ", "seconds ")))
            met = "yes" if r.get("met") else "no"
            lines.append(f"| `{r['stage']}` | {r['check']} | {r['aim']} | {met} | {shown} |")
    return "\n".join(lines) + "\n" if len(lines) > 3 else ""


def timed(title: str, results: list[Values]) -> str:
    """A row for each thing that was timed, a column for each figure."""
    told = {"seconds_to_first", "tokens_per_second", "host_share"}
    rows = [r for r in results if not told.isdisjoint(r)]
    if not rows:
        return ""
    hidden = {"stage", "check", "seconds", "ok", "met"}
    columns = list(dict.fromkeys(
        k for r in rows for k, v in r.items() if isinstance(v, int | float) and k not in hidden
    ))  # fmt: skip
    lines = [f"### {title}\n", f"| | {' | '.join(c.replace('_', ' ') for c in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for r in rows:
        cells = [short(r[c]) if c in r else "" for c in columns]
        lines.append(f"| {r['check']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def listing(title: str, results: Iterable[Values], ok: bool | None) -> str:
    own = [r for r in results if r["ok"] is ok]
    lines = [f"- `{r['stage']}`, {r['check']}: {reason(r)}" for r in own]
    return "\n".join([f"### {title}\n", *lines]) + "\n" if lines else ""


def reason(record: Values) -> str:
    skip = {"stage", "check", "ok", "seconds", "where", "profile"}
    told = record.get("reason") or record.get("error")
    return told or ", ".join(f"{k} {short(v)}" for k, v in record.items() if k not in skip)

"""Try a kernel with a tiny step and compare with plain arithmetic; runs as a process of its own.

``python -m jackfield_plugins.attention.varlen_probe request.json answer.json``
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from jackfield_plugins.attention.published import kernel_of
from jackfield_plugins.attention.varlen import Rows, Scoring, VarlenKernel
from jackfield_plugins.hub_kernels.repository import brief, load_build

#: What a kernel that promises no other name is looked up by, in this order.
FUNCTIONS = ("flash_attn_varlen_func", "flash_attention_varlen")

#: How far a kernel may be from float64; float32 leaves room for TF32.
TOLERANCE = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 2e-3, "float64": 2e-3}

#: Queries and keys of each sequence: a mixed step, and one of single queries, which is often
#: another kernel.
LENGTHS = (((3, 1, 5), (7, 4, 5)), ((1, 1, 1), (7, 4, 5)))
SOFTCAP, WINDOW = 0.75, 3
PAGE = 256
BEHIND = 2  # tokens behind the last sequence, which are nobody's


def pick(module: ModuleType, name: str | None) -> Any:
    """The varlen function of a kernel. Raises ValueError where there is none."""
    found = next((f for f in ([name] if name else FUNCTIONS) if hasattr(module, f)), None)
    if found is None:
        has = ", ".join(n for n in vars(module) if n[0] != "_" and callable(vars(module)[n]))
        wanted = repr(name) if name else " or ".join(map(repr, FUNCTIONS))
        raise ValueError(f"it has no function {wanted} (it has: {has or 'none'})")
    return getattr(module, found)


def kernel_in(module: ModuleType, name: str | None) -> VarlenKernel:
    """The kernel of a module. Raises ValueError where it has none that is known."""
    return kernel_of(pick(module, name), getattr(module, "flash_attn_with_kvcache", None))


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scoring: Scoring
) -> torch.Tensor:
    """Attention over rows in float64, one sequence after the other; the oracle of every kernel."""
    output = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    starts_q, starts_k = rows.cu_seqlens_q.tolist(), rows.cu_seqlens_k.tolist()
    for i in range(len(starts_q) - 1):
        q, k, v = (
            t[starts[i] : starts[i + 1]].double().transpose(0, 1)
            for t, starts in ((query, starts_q), (keys, starts_k), (values, starts_k))
        )
        k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        # Position of each query minus that of each key: the last of both stand side by side.
        ahead = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        ahead = (ahead - torch.arange(k.shape[1])).to(scores.device)
        if scoring.causal:
            scores = scores.masked_fill(ahead < 0, float("-inf"))
        if scoring.window is not None:
            scores = scores.masked_fill(ahead >= scoring.window, float("-inf"))
        if scoring.sinks is not None:
            sinks = scoring.sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        output[starts_q[i] : starts_q[i + 1]] = (weights @ v).transpose(0, 1)
    return output


def examine(request: dict[str, Any]) -> dict[str, Any]:
    """Load the kernel and try it: {"page_multiple": …}, or {"refused": reason}."""
    try:
        module = load_build(Path(request["folder"]))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code
        return {"refused": f"it does not load ({type(error).__name__}: {brief(error)})"}
    try:
        kernel = kernel_in(module, request["function"])
    except ValueError as error:
        return {"refused": str(error)}
    return trial(kernel, request)


def trial(kernel: VarlenKernel, request: dict[str, Any]) -> dict[str, Any]:
    """Compare the kernel with plain arithmetic, for each head size and with what is asked of it."""
    if lacking := sorted(set(request["features"]) - kernel.features):
        return {"refused": f"it has no parameter for {', '.join(lacking)}"}
    reads_pages = kernel.page_multiple is not None
    for size, (queries, keys) in itertools.product(request["head_dims"], LENGTHS):
        step = _step(size, request, queries, keys)
        plain = Scoring(scale=0.7)
        asked = _asked(request["features"], step.query)
        for scoring in (plain, asked):
            if flaw := _flaw(kernel, step, scoring, request["dtype"]):
                what = f"head size {size}, {request['dtype']} on {request['device']}"
                return {"refused": f"with {what} {flaw}"}
            reads_pages = reads_pages and not _flaw(
                kernel, _in_pages(step, keys), scoring, request["dtype"], step
            )
        if flaw := _flaw(kernel, _with_more(step), plain, request["dtype"], step):
            return {"refused": f"with tokens behind the last sequence {flaw}"}
    return {"page_multiple": kernel.page_multiple if reads_pages else None}


class _Step(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: Rows


def _step(
    size: int, request: dict[str, Any], queries: tuple[int, ...], keys: tuple[int, ...]
) -> _Step:
    """A ragged step of random numbers."""
    draw = torch.Generator().manual_seed(0)
    device, dtype = request["device"], getattr(torch, request["dtype"])
    shapes = [(sum(queries), 2 * request["group"]), (sum(keys), 2), (sum(keys), 2)]
    tensors = [torch.randn(*shape, size, generator=draw) for shape in shapes]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (queries, keys))
    query, key, value = (t.to(device, dtype) for t in tensors)
    return _Step(query, key, value, Rows(cu_q, cu_k, max(queries), max(keys)))


def _asked(features: list[str], query: torch.Tensor) -> Scoring:
    sinks = torch.linspace(-1, 1, query.shape[1]).to(query)
    return Scoring(
        scale=0.7,
        window=WINDOW if "sliding_window" in features else None,
        softcap=SOFTCAP if "softcap" in features else None,
        sinks=sinks if "sinks" in features else None,
    )


def _with_more(step: _Step) -> _Step:
    """The same, as a padded batch brings it: tokens behind the rows, and bounds that are wider."""

    def longer(rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows, (0, 0, 0, 0, 0, BEHIND), value=float("nan"))

    several = step.rows.max_seqlen_q > 1  # single queries are one for each sequence
    query = longer(step.query) if several else step.query
    rows = replace(
        step.rows,
        max_seqlen_q=step.rows.max_seqlen_q + several,
        max_seqlen_k=step.rows.max_seqlen_k + 1,
    )
    return _Step(query, longer(step.keys), longer(step.values), rows)


def _in_pages(step: _Step, lengths: tuple[int, ...]) -> _Step:
    """The same keys in pages, those of the last sequence first."""
    pages = len(lengths)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=step.query.device)
    rows = replace(
        step.rows, block_table=table[:, None].contiguous(), seqused_k=step.rows.cu_seqlens_k.diff()
    )

    def paged(rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(lengths)[::-1]
        return torch.stack([F.pad(part, (0, 0, 0, 0, 0, PAGE - len(part))) for part in parts])

    return _Step(step.query, paged(step.keys), paged(step.values), rows)


def _flaw(
    kernel: VarlenKernel, step: _Step, scoring: Scoring, dtype: str, plain: _Step | None = None
) -> str | None:
    """What is wrong with the kernel's answer; `plain` is the step for the reference."""
    query, keys, values, rows = step
    try:
        found = kernel.attend(query, keys, values, rows, scoring)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code
        return f"it raises {type(error).__name__}: {brief(error)}"
    shape = getattr(found, "shape", None)
    if shape != query.shape:
        return f"it returns {shape or type(found).__name__} for a query of {query.shape}"
    wanted = reference(*(plain or step), scoring)
    off = (found[: len(wanted)].double() - wanted).abs().max().item()
    if not off <= TOLERANCE[dtype]:
        how = [n for n in ("window", "softcap", "sinks") if getattr(scoring, n) is not None]
        return f"it is wrong by {off:.2g}{' with ' + ', '.join(how) if how else ''}"
    return None


if __name__ == "__main__":
    asked_path, answered_path = map(Path, sys.argv[1:])
    answered_path.write_text(json.dumps(examine(json.loads(asked_path.read_text()))))

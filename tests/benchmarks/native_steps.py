"""Decode steps of the compiler `native` against uncompiled ones and transformers' `generate`.

`python native_steps.py MODEL DTYPE ROWS…` with a model of `MODELS` runs them in turn, in one
process, and prints a row of a table for each number of rows: medians of milliseconds a step, and
ratios. A step is what one more token takes: two generations are timed whose lengths differ. The
limit is the time to read the weights once, as fast as this machine reads memory.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmark_compile import demo, hundred_million
from workload import Load, Outputs, half_billion, regret

import jackfield
from jackfield.bridge.bandwidth import measure_bandwidth

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT, LONG, PROMPT, ROUNDS = 4, 28, 48, 5
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "demo": demo, "110M": hundred_million, "half": half_billion,
}  # fmt: skip
#: how far a chosen token may be from the best one, in logits, by what is rounded
REGRETS = {"float32": 1e-3, "bfloat16": 0.5, "int4-cpu": float("inf")}


def load(rows: int, vocab_size: int) -> Load:
    prompts = [
        [5 + (7919 * row + 104729 * at) % (vocab_size - 10) for at in range(PROMPT)]
        for row in range(rows)
    ]
    return Load(prompts, [LONG] * rows)


def generate(model: PreTrainedModel, prompts: list[list[int]], new: int) -> Outputs:
    ids = torch.tensor(prompts)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return found[:, PROMPT:].tolist()  # type: ignore[no-any-return]


def contenders(name: str, dtype: str, most: int) -> dict[str, Any]:
    """What makes tokens, each with a model of its own."""
    torch_dtype = torch.bfloat16 if dtype == "int4-cpu" else getattr(torch, dtype)
    plain = MODELS[name]().to(torch_dtype)
    found: dict[str, Any] = {"generate": lambda prompts, new: generate(plain, prompts, new)}
    source: Any = None
    if dtype == "int4-cpu":
        folder = tempfile.mkdtemp()
        plain.save_pretrained(folder)
        source = Path(folder)
    for compiler in ("none", "native"):
        given = {"quantization": "int4-cpu"} if source else {}
        model = source or MODELS[name]().to(torch_dtype)
        engine = jackfield.load(
            model, compile=compiler, cache_implementation="paged", dtype=torch_dtype,
            max_batch_size=most, **given,
        )  # fmt: skip

        def ours(prompts: list[list[int]], new: int, engine: Any = engine) -> Outputs:
            done = engine.generate(prompts, max_new_tokens=new, min_new_tokens=new)
            return [one.token_ids for one in done]

        found[compiler] = ours
    return found


def step(run: Callable[..., Outputs], prompts: list[list[int]]) -> float:
    """Milliseconds of one decode step."""
    times = []
    for new in (SHORT, LONG):
        began = time.perf_counter()
        run(prompts, new)
        times.append(time.perf_counter() - began)
    return (times[1] - times[0]) / (LONG - SHORT) * 1000


def weight_bytes(name: str, dtype: str) -> float:
    """What one step reads of weights, all but a table of embeddings that is not the head."""
    model = MODELS[name]()
    table: Any = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    numbers = sum(p.numel() for p in model.parameters()) - (0 if tied else table.numel())
    if dtype == "int4-cpu":  # the head is whole
        head = table.numel()
        return (numbers - head) * 4.5 / 8 + head * 2
    return numbers * getattr(torch, dtype).itemsize


def main(name: str, dtype: str, rows: list[int]) -> None:
    bandwidth = measure_bandwidth("cpu")
    limit = weight_bytes(name, dtype) / bandwidth * 1000
    runs = contenders(name, dtype, max(rows))
    exact = MODELS[name]().float()
    for count in rows:
        wanted = load(count, exact.config.vocab_size)
        worst = 0.0
        for label in ("none", "native"):  # and what is traced is traced
            worst = max(worst, regret(exact, wanted, runs[label](wanted.prompts, LONG)))
        assert worst <= REGRETS[dtype], worst
        took: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(ROUNDS):
            for label, run in runs.items():
                took[label].append(step(run, wanted.prompts))
        print(  # noqa: T201
            f"| {name} | {dtype} | {count} | "
            + " | ".join(f"{statistics.median(took[label]):.2f}" for label in runs)
            + f" | {limit:.2f} | "
            + " | ".join(_ratio(took[label], took["native"]) for label in ("generate", "none"))
            + f" | {worst:.2g} |",
            flush=True,
        )


def _ratio(other: list[float], mine: list[float]) -> str:
    ratios = sorted(b / a for a, b in zip(mine, other, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], [int(count) for count in sys.argv[3:]])

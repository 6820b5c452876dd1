"""Whole engines with all that only runs on a GPU: their texts against plain `generate`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from families import build, prompts

import jackfield
from gpucheck.bench import Bench
from gpucheck.judging import generated, verdict
from gpucheck.results import SkippedError, Values
from jackfield.errors import UsageError

#: By how much a token's logit may be below the best one.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


@dataclass(frozen=True)
class Run:
    """What `jackfield.load` is given beside a model of `family`, in `dtype`."""

    label: str
    load: Mapping[str, Any]
    dtype: str
    family: str = "llama"


def _run(label: str, attention: str, cache: str, dtype: str = "float32", **more: Any) -> Run:
    chosen = {"attn_implementation": attention, "cache_implementation": cache, "compile": "none"}
    return Run(label, {**chosen, **more}, dtype)


PAGED = "paged?num_tokens=2048"
BETWEEN = "cuda_graph?record=between"
RUNS = (
    _run("paged, triton", "triton", PAGED),
    _run("paged, sdpa", "sdpa", PAGED),
    _run("paged, eager", "eager", PAGED),
    _run("paged, triton, cuda_graph", "triton", PAGED, compile="cuda_graph"),
    _run("paged, triton, cuda_graph, fused", "triton", PAGED, compile="cuda_graph?fuse=true"),
    _run("paged, triton, cuda_graph between", "triton", PAGED, compile=BETWEEN),
    _run(
        "paged, triton, cuda_graph, drafts",
        "triton",
        PAGED,
        compile="cuda_graph",
        decoding="prompt_lookup",
    ),
    _run("paged, triton, norms", "triton", PAGED, kernels="triton-rms-norm"),
    _run("paged, triton, drafts", "triton", PAGED, decoding="prompt_lookup"),
    _run("paged, triton, chunks of 5", "triton", PAGED, prefill_chunk_size=5),
    _run("paged, flash 2, pages of 32", "flash_attention_2", PAGED, "bfloat16"),
    _run("paged, flash 2, pages of 256", "flash_attention_2", f"{PAGED}&page_size=256", "bfloat16"),
    _run("paged, flash 3", "flash_attention_3", PAGED, "bfloat16"),
    _run("paged, triton, bfloat16", "triton", PAGED, "bfloat16"),
    _run("dynamic, sdpa", "sdpa", "dynamic"),
    _run("dynamic, flash 2", "flash_attention_2", "dynamic", "bfloat16"),
    _run("static, sdpa", "sdpa", "static"),
    _run("static, sdpa, cuda_graph", "sdpa", "static", compile=BETWEEN),
    _run("dynamic, sdpa, cuda_graph", "sdpa", "dynamic", compile=BETWEEN),
    _run("offloaded, sdpa", "sdpa", "offloaded"),
    _run("offloaded_static, sdpa", "sdpa", "offloaded_static"),
)
# Takes no heads of 8 there, as those of the others' model are, and compiles longer than the rest.
FLEX = replace(_run("dynamic, flex", "flex_attention", "dynamic"), family="qwen3")


def run(bench: Bench) -> None:
    for each in RUNS:
        bench.results.run(each.label, judged, bench, each)
    bench.results.run("paged, triton, swap", swapped, bench)
    with tempfile.TemporaryDirectory() as folder:
        build("llama", torch.float32).save_pretrained(folder)
        placements(bench, folder)
        quantizers(bench, folder)
    bench.results.run(FLEX.label, judged, bench, FLEX)


def swapped(bench: Bench) -> Values:
    """A pool that has no room for all, so that some are swapped out."""
    pool = f"paged?page_size=1&num_tokens={bench.sizes.swapped}&swap=true"
    found = judged(bench, _run("", "triton", pool))
    return {**found, "ok": found["ok"] and found["preemptions"] > 0}


def judged(bench: Bench, each: Run) -> Values:
    """Texts of a ragged batch, and of a prompt by itself, and what was seen to run."""
    sizes = bench.sizes
    model = build(each.family).to(bench.device.name, getattr(torch, each.dtype))
    texts = prompts(sizes.prompts)
    expected = generated(model, texts, sizes.new_tokens)
    with loaded(model, each.load) as engine:
        found = [c.token_ids for c in engine.generate(texts, max_new_tokens=sizes.new_tokens)]
        (alone,) = engine.generate(texts[-1], max_new_tokens=sizes.new_tokens)
        report = engine.report()
        seen = {
            "source": report["attention"].source,
            "preemptions": engine.statistics().preemptions,
            "compiled": str(report["compiler"].compiled or ""),
        }
    bound = BOUNDS[each.dtype]
    together = verdict(model, texts, expected, found, bound)
    single = verdict(model, texts[-1:], expected[-1:], [alone.token_ids], bound)
    return {**together, "ok": together["ok"] and single["ok"], "alone": single["tokens"], **seen}


@contextlib.contextmanager
def loaded(model: Any, arguments: Mapping[str, Any]) -> Iterator[jackfield.Engine]:
    """An engine. What is refused before weights load is skipped, with the reason."""
    try:
        engine = jackfield.load(model, **arguments)
    except UsageError as reason:
        raise SkippedError(str(reason)) from None
    with engine:
        yield engine


def placements(bench: Bench, folder: str) -> None:
    device = bench.device.name
    maps: dict[str, Mapping[str, Any]] = {
        "weights read to one device": {"device_map": device},
        "weights, auto": {"device_map": "auto"},
        "weights, half on the processor": {
            "device_map": "auto", "max_memory": {device_key(device): "60kB", "cpu": "1GB"},
        },
    }  # fmt: skip
    for index in range(1, torch.cuda.device_count()):
        maps[f"weights on cuda:{index}"] = {"device_map": f"cuda:{index}"}
    for label, arguments in maps.items():
        own = {**arguments, "dtype": "float32"}
        bench.results.run(label, of_folder, bench, folder, own, "float32")


def device_key(device: str) -> int | str:
    return 0 if device.startswith("cuda") else device


def quantizers(bench: Bench, folder: str) -> None:
    for name in bench.sizes.quantizers:
        dtype = "bfloat16"
        arguments = {"quantization": name, "device_map": bench.device.name, "dtype": dtype}
        bench.results.run(f"quantizer {name}", of_folder, bench, folder, arguments, dtype)


def of_folder(bench: Bench, folder: str, arguments: Mapping[str, Any], dtype: str) -> Values:
    """Texts of what is loaded from a folder, against those of the same weights in `generate`."""
    sizes = bench.sizes
    texts = prompts(sizes.prompts)
    with loaded(folder, arguments) as engine:
        found = [c.token_ids for c in engine.generate(texts, max_new_tokens=sizes.new_tokens)]
        chosen = {kind: engine.plan[kind].registered.name for kind in ("attention", "cache")}
        where = str(engine.plan.placement)
        model = engine.model
    expected = generated(model, texts, sizes.new_tokens)
    return {
        **verdict(model, texts, expected, found, BOUNDS[dtype]), **chosen, "weights": where
    }  # fmt: skip

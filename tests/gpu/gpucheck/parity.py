"""Tiny models of many families with `auto`, in float32: the tokens of eager `generate`."""

from __future__ import annotations

import torch
from families import build, prompts

from gpucheck.bench import Bench
from gpucheck.engines import BOUNDS, loaded
from gpucheck.judging import generated, verdict
from gpucheck.results import Values


def run(bench: Bench) -> None:
    for family in bench.sizes.families:
        bench.results.run(family, of_family, bench, family)


def of_family(bench: Bench, family: str) -> Values:
    sizes = bench.sizes
    model = build(family, torch.float32).to(bench.device.name)
    texts = prompts(sizes.prompts)
    expected = generated(model, texts, sizes.new_tokens)
    with loaded(model, {}) as engine:
        chosen = {kind: engine.plan[kind].registered.name for kind in ("attention", "cache")}
        found = [c.token_ids for c in engine.generate(texts, max_new_tokens=sizes.new_tokens)]
    return {**verdict(model, texts, expected, found, BOUNDS["float32"]), **chosen}

"""One sequence of an 8-billion-parameter model: every token reads all weights once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucheck.bench import Bench
from gpucheck.speed import Race, profile_engine, race_engine, race_rival

POOL = "paged?num_tokens=16384"
FLASH = {
    "attn_implementation": "flash_attention_2",
    "cache_implementation": f"{POOL}&page_size=256",
}
TRITON = {"attn_implementation": "triton", "cache_implementation": POOL}
GRAPHS = {"compile": "cuda_graph"}
PIECES = {"compile": "cuda_graph?record=between"}
WHOLE, BETWEEN = "paged, triton, cuda_graph", "paged, triton, cuda_graph between attentions"
AIMS = {"share_of_bandwidth": 0.8, "times_generate": 4.0}

ENGINES: dict[str, dict[str, Any]] = {
    WHOLE: {**TRITON, **GRAPHS, "max_batch_size": 1},  # else other sizes are traced as well
    BETWEEN: {**TRITON, **PIECES},
    "paged, triton": TRITON,
    "auto": {},
    "paged, flash 2": FLASH,
}
PROFILES = ("paged, triton", WHOLE)
#: If time is left after transformers' own compiled steps, which take a minute to compile.
MORE: dict[str, dict[str, Any]] = {
    "paged, flash 2, cuda_graph": {**FLASH, **GRAPHS},
    "static, sdpa, cuda_graph": {
        "attn_implementation": "sdpa", "cache_implementation": "static?max_cache_len=256", **GRAPHS,
    },
}  # fmt: skip


def against_pieces(bench: Bench, taken: Mapping[str, float | None]) -> None:
    """Steps that are played whole, against those recorded between attentions; seconds a step."""
    whole, between = taken.get(WHOLE), taken.get(BETWEEN)
    if whole and between:
        bench.results.note(
            "whole steps, against those between attentions", times_between=between / whole,
            aim="times_between at least 1", met=between >= whole,
        )  # fmt: skip


def run(bench: Bench) -> None:
    race = Race.of(bench, 1, bench.sizes.decode_prompt)
    expected = race.generate(bench.sizes.decode_tokens)
    taken = {
        label: race_engine(race, label, arguments, expected, AIMS)
        for label, arguments in ENGINES.items()
    }
    against_pieces(bench, taken)
    for label in PROFILES:
        profile_engine(race, label, ENGINES[label])
    race_rival(race, "generate, static cache, compiled", race.generate_static, expected)
    for label, arguments in MORE.items():
        race_engine(race, label, arguments, expected, AIMS)

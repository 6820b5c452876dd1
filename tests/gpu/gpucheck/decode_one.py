"""One sequence of an 8-billion-parameter model: every token reads all weights once."""

from __future__ import annotations

from typing import Any

from gpucheck.bench import Bench
from gpucheck.speed import Race, profile_engine, race_engine, race_rival

POOL = "paged?num_tokens=16384"
FLASH = {
    "attn_implementation": "flash_attention_2",
    "cache_implementation": f"{POOL}&page_size=256",
}
TRITON = {"attn_implementation": "triton", "cache_implementation": POOL, "compile": "none"}
GRAPHS = {"compile": "cuda_graph"}
FUSE = {"compile": "cuda_graph?fuse=true"}
PIECES = {"compile": "cuda_graph?record=between"}
WHOLE, FUSED = "paged, triton, cuda_graph", "paged, triton, cuda_graph, fused"
AIMS = {"share_of_bandwidth": 0.8, "times_generate": 4.0}

ENGINES: dict[str, dict[str, Any]] = {
    WHOLE: {**TRITON, **GRAPHS},
    FUSED: {**TRITON, **FUSE, "max_batch_size": 1},  # else other sizes are traced as well
    "auto": {},
    "paged, triton": TRITON,
    "paged, flash 2": FLASH,
}
PROFILES = ("paged, triton", WHOLE)
#: If time is left after transformers' own compiled steps, which take a minute to compile.
MORE: dict[str, dict[str, Any]] = {
    "paged, flash 2, cuda_graph between": {**FLASH, **PIECES},
    "static, sdpa, cuda_graph between": {
        "attn_implementation": "sdpa", "cache_implementation": "static?max_cache_len=256", **PIECES,
    },
}  # fmt: skip


def run(bench: Bench) -> None:
    race = Race.of(bench, 1, bench.sizes.decode_prompt)
    expected = race.generate(bench.sizes.decode_tokens)
    for label, arguments in ENGINES.items():
        race_engine(race, label, arguments, expected, AIMS)
    for label in PROFILES:
        profile_engine(race, label, ENGINES[label])
    race_rival(race, "generate, static cache, compiled", race.generate_static, expected)
    for label, arguments in MORE.items():
        race_engine(race, label, arguments, expected, AIMS)

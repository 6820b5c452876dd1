"""One sequence of an 8-billion-parameter model: every token reads all weights once."""

from __future__ import annotations

from typing import Any

from gpucheck.bench import Bench
from gpucheck.speed import Race, race_engine, race_rival

POOL = "paged?num_tokens=16384"
FLASH = {
    "attn_implementation": "flash_attention_2",
    "cache_implementation": f"{POOL}&page_size=256",
}
TRITON = {"attn_implementation": "triton", "cache_implementation": POOL}
GRAPHS = {"compile": "cuda_graph"}
AIMS = {"share_of_bandwidth": 0.8, "times_generate": 4.0}

ENGINES: dict[str, dict[str, Any]] = {
    "paged, triton, cuda_graph": {**TRITON, **GRAPHS},
    "paged, triton": TRITON,
    "auto": {},
    "paged, flash 2": FLASH,
}
#: If time is left after transformers' own compiled steps, which take a minute to compile.
MORE: dict[str, dict[str, Any]] = {
    "paged, flash 2, cuda_graph": {**FLASH, **GRAPHS},
    "static, sdpa, cuda_graph": {
        "attn_implementation": "sdpa", "cache_implementation": "static?max_cache_len=256", **GRAPHS,
    },
}  # fmt: skip


def run(bench: Bench) -> None:
    race = Race.of(bench, 1, bench.sizes.decode_prompt)
    expected = race.generate(bench.sizes.decode_tokens)
    for label, arguments in ENGINES.items():
        race_engine(race, label, arguments, expected, AIMS)
    race_rival(race, "generate, static cache, compiled", race.generate_static, expected)
    for label, arguments in MORE.items():
        race_engine(race, label, arguments, expected, AIMS)

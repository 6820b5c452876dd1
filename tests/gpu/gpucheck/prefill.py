"""Long prompts of an 8-billion-parameter model: the time to the first token."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from gpucheck.bench import Bench
from gpucheck.engines import loaded
from gpucheck.judging import Tokens
from gpucheck.models import prompts_of
from gpucheck.speed import Race

POOL = "paged?num_tokens=65536&prefix_sharing=false"  # a prompt that is read again is computed
CHUNK = 8192
ENGINES: dict[str, dict[str, Any]] = {
    "paged, triton": {
        "attn_implementation": "triton",
        "cache_implementation": POOL,
        "compile": "none",
    },
    "paged, flash 2": {
        "attn_implementation": "flash_attention_2",
        "cache_implementation": f"{POOL}&page_size=256",
    },
}


def run(bench: Bench) -> None:
    race = Race.of(bench, 1, bench.sizes.decode_prompt)
    weights = sum(p.numel() for p in race.model.parameters())
    for length in bench.sizes.prefills:
        prompt = prompts_of(1, length, bench.sizes.large["vocab_size"])
        long = replace(race, prompts=prompt)
        with bench.results.check(f"{length} tokens: generate") as found:
            expected = long.generate(1)
            found["seconds_to_first"] = median(long, long.generate)
        for label, arguments in ENGINES.items():
            with bench.results.check(f"{length} tokens: {label}") as found:
                more = {**arguments, "max_batch_tokens": CHUNK}
                with loaded(race.model, more) as engine:

                    def ours(count: int, engine: Any = engine) -> Tokens:
                        done = engine.generate(prompt, max_new_tokens=count)  # noqa: B023
                        return [completion.token_ids for completion in done]

                    text = ours(1)
                    seconds = median(long, ours)
                found["seconds_to_first"] = seconds
                found["tokens_per_second"] = length / seconds
                found["teraflops_of_the_weights"] = 2 * weights * length / seconds / 1e12
                found.update(long.verdict(race.twin, expected, text))


def median(race: Race, run: Any) -> float:
    return statistics.median(race.seconds(run, 1) for _ in range(race.bench.sizes.rounds))

"""Many sequences of an 8-billion-parameter model, against `generate` and `generate_batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpucheck.bench import Bench
from gpucheck.decode_one import FLASH, FUSE, FUSED, GRAPHS, PROFILES, TRITON, WHOLE
from gpucheck.judging import Tokens
from gpucheck.results import SkippedError
from gpucheck.speed import AT_FIRST, Race, Run, profile_engine, race_engine, race_rival

AIM = 1.5  # times the speed of `generate_batch`
BATCH_TOKENS = 4096  # of a step, for all: every prompt is read in the first one
_MOST = {"max_batch_tokens": BATCH_TOKENS}
ENGINES: dict[str, dict[str, Any]] = {
    WHOLE: {**TRITON, **GRAPHS, **_MOST},
    "paged, triton": {**TRITON, **_MOST},
    "paged, flash 2": {**FLASH, **_MOST},
    FUSED: {**TRITON, **FUSE, **_MOST},
}


def run(bench: Bench) -> None:
    race = Race.of(bench, bench.sizes.batch, bench.sizes.batch_prompt)
    expected = race.generate(bench.sizes.decode_tokens)
    theirs = None
    for number, (label, how) in enumerate(ENGINES.items()):
        seconds = race_engine(race, label, how, expected, {})
        if number == 0:  # the rest takes longest to compile, and may be cut
            with bench.results.check("generate_batch: start"), batching(race) as batch:
                theirs = race_rival(race, "generate_batch", batch, expected)
        if seconds and theirs:
            times = theirs / seconds
            bench.results.note(
                f"{label}, against generate_batch", times_generate_batch=times,
                aim=f"times_generate_batch at least {AIM}", met=times >= AIM,
            )  # fmt: skip
    for label in PROFILES:
        profile_engine(race, label, ENGINES[label])


@contextlib.contextmanager
def batching(race: Race) -> Iterator[Run]:
    """transformers' continuous batching, its manager and graphs made once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = race.twin
    if not hasattr(model, "continuous_batching_context_manager"):
        raise SkippedError("this transformers has no manager of continuous batching")
    most = race.bench.sizes.decode_tokens + AT_FIRST
    settings = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=-1)
    config = ContinuousBatchingConfig(max_batch_tokens=BATCH_TOKENS, num_blocks=512)
    before = model.config._attn_implementation
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config
    ) as manager:

        def generate_batch(count: int) -> Tokens:
            ids = [manager.add_request(p, max_new_tokens=count) for p in race.prompts]
            done: dict[str, list[int]] = {}
            while len(done) < len(ids):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the manager of continuous batching has ended")
                if result is not None and result.is_finished():
                    done[result.request_id] = result.generated_tokens
            return [done[i] for i in ids]

        yield generate_batch
    model.set_attn_implementation(before)

"""What should not happen: waits, compilations in the middle, memory that stays taken."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import jackfield
from gpucheck.bench import Bench
from gpucheck.engines import loaded
from gpucheck.models import prompts_of, random_model
from gpucheck.results import SkippedError, Values
from jackfield.errors import UsageError

POOL = "paged?num_tokens=8192"
ENGINES: dict[str, dict[str, Any]] = {
    "auto": {},
    "paged, triton": {
        "attn_implementation": "triton", "cache_implementation": POOL, "compile": "none",
    },
    "paged, flash 2": {
        "attn_implementation": "flash_attention_2",
        "cache_implementation": f"{POOL}&page_size=256",
    },
    "paged, triton, cuda_graph": {
        "attn_implementation": "triton", "cache_implementation": POOL, "compile": "cuda_graph",
    },
    "paged, triton, cuda_graph between": {
        "attn_implementation": "triton", "cache_implementation": POOL,
        "compile": "cuda_graph?record=between",
    },
    "paged, sdpa": {"attn_implementation": "sdpa", "cache_implementation": POOL},
}  # fmt: skip


def run(bench: Bench) -> None:
    model = random_model(bench.sizes.counted, bench.device.name, bench.sizes.large_dtype)
    for label, arguments in ENGINES.items():
        bench.results.run(f"waits a step: {label}", waits, bench, model, arguments)
    bench.results.run("pools of engines one after another", pools_in_turn, bench, model)
    bench.results.run("pools of two engines at once", pools_at_once, bench)
    bench.results.run("deterministic", deterministic, bench, model)
    bench.results.run("kernels behind sdpa in an engine", order_of_sdpa, bench, model)
    for label, arguments in ENGINES.items():
        name = f"compilations after warm-up: {label}"
        bench.results.run(name, compilations, bench, model, arguments)


def waits(bench: Bench, model: Any, arguments: dict[str, Any]) -> Values:
    """How often the host waits for the device in a step, all rows decoding."""
    sizes = bench.sizes
    texts = prompts_of(sizes.counted_batch, 24, model.config.vocab_size)
    with loaded(model, arguments) as engine:
        engine.generate(texts, max_new_tokens=sizes.counted_tokens)
        before = engine.report()["cache"].calls
        with bench.device.waits() as found:
            engine.generate(texts, max_new_tokens=sizes.counted_tokens)
        steps = engine.report()["cache"].calls - before
    share = sum(found.values()) / steps
    return {"waits": share, "steps": steps, "aim": "at most 1", "met": share <= 1,
            "found": dict(found.most_common(8))}  # fmt: skip


def compilations(bench: Bench, model: Any, arguments: dict[str, Any]) -> Values:
    """What Triton compiles while one sequence grows, and batches of all sizes come and go."""
    sizes, vocab = bench.sizes, model.config.vocab_size
    with loaded(model, arguments) as engine:
        engine.generate(prompts_of(sizes.counted_batch, 24, vocab), max_new_tokens=4)
        engine.generate(prompts_of(1, 24, vocab), max_new_tokens=4)
        graphs = engine.report()["compiler"].compiled
        with triton_compilations() as found:
            engine.generate(prompts_of(1, 3, vocab), max_new_tokens=sizes.longest)
            for count in range(1, sizes.counted_batch + 1):
                engine.generate(prompts_of(count, 5 + 16 * count, vocab), max_new_tokens=3)
        later = engine.report()["compiler"].compiled
    return {
        "compilations": sum(found.values()), "aim": "none", "met": not found,
        "kernels": dict(found), "graphs": f"{graphs} at first, {later} in the end",
    }  # fmt: skip


@contextlib.contextmanager
def triton_compilations() -> Iterator[Counter[str]]:
    """Counts the kernels that are specialised anew, by name. Raises SkippedError without Triton."""
    found: Counter[str] = Counter()
    try:
        from triton import knobs
    except ImportError as error:
        raise SkippedError(str(error)) from None

    def compiled(*args: Any, **kwargs: Any) -> None:
        found[kwargs["fn"].name if "fn" in kwargs else "a kernel"] += 1

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = compiled
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def pools_in_turn(bench: Bench, model: Any) -> Values:
    """Three engines, each closed before the next: each gets as much memory as the first."""
    pools, held = [], []
    for _ in range(3):
        with loaded(model, {"cache_implementation": "paged"}) as engine:
            engine.generate([[5, 6, 7]], max_new_tokens=3)
            pools.append(pool_bytes(engine))
        held.append(bench.device.held())
    share = min(pools) / max(pools[0], 1)
    return {"ok": share > 0.95, "pools": pools, "smallest": share, "held_after_close": held}


def pools_at_once(bench: Bench) -> Values:
    """Two engines that are bound before the first step of either both run."""
    sizes = bench.sizes
    models = [random_model(sizes.counted, bench.device.name, sizes.large_dtype) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(loaded(model, {"cache_implementation": "paged"}))
            for model in models
        ]
        texts = [e.generate([[5, 6, 7]], max_new_tokens=3)[0].token_ids for e in engines]
        pools = [pool_bytes(engine) for engine in engines]
    return {"ok": texts[0] == texts[1], "pools": pools}


def pool_bytes(engine: jackfield.Engine) -> int:
    return engine._loop.cache.usage().num_bytes


def order_of_sdpa(bench: Bench, model: Any) -> Values:
    """cuDNN, which plans anew for each length of keys, is asked behind the other fused ones."""
    prompts = prompts_of(2, 24, model.config.vocab_size)
    with loaded(model, {"attn_implementation": "sdpa", "cache_implementation": POOL}) as engine:
        engine.generate(prompts, max_new_tokens=3)
        order = [int(backend) for backend in torch._C._get_sdp_priority_order()]
    last, *first = (
        order.index(int(backend))
        for backend in (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        )
    )
    return {"ok": last > max(first), "order": order}


def deterministic(bench: Bench, model: Any) -> Values:
    """Refused, or the same bits in company as alone."""
    vocab = model.config.vocab_size
    texts = prompts_of(bench.sizes.counted_batch, 24, vocab)
    try:
        engine = jackfield.load(model, deterministic=True, cache_implementation=POOL)
    except UsageError as reason:
        return {"is": "refused", "reason": str(reason)}
    settings = {"max_new_tokens": bench.sizes.counted_tokens, "logprobs": 1}
    with engine:
        alone = engine.generate(texts[0], **settings)[0]
        (together, *_) = engine.generate(texts, **settings)
    same = alone.token_ids == together.token_ids and alone.logprobs == together.logprobs
    return {"is": "accepted", "ok": same}

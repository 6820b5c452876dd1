"""The stages, the most important first, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """`module` of this package has a function `run(bench)`. `limit` in seconds."""

    name: str
    module: str
    limit: int
    what: str


STAGES = (
    Stage(
        "machine", "machine", 15,
        "GPU, driver, libraries, compilers, headers, and the signatures that backends rely on",
    ),
    Stage(
        "kernels", "kernels", 80,
        "packed attentions and norms against float64: windows, softcaps, sinks, drafts, pages",
    ),
    Stage(
        "engines", "engines", 65,
        "CUDA graphs, offloaded caches, swapped pages, quantizers, placement: tokens of `generate`",
    ),
    Stage(
        "parity", "parity", 50,
        "tiny models of many families with `auto` in float32 against eager `generate`",
    ),
    Stage(
        "counters", "counters", 55,
        "waits a step, compilations after warm-up, pools of later engines, `deterministic`",
    ),
    Stage(
        "decode-1", "decode_one", 140,
        "8 billion parameters, one sequence: share of the bandwidth, against `generate`, profile",
    ),
    Stage(
        "decode-32", "decode_many", 105,
        "8 billion parameters, 32 sequences: against `generate` and `generate_batch`, profile",
    ),
    Stage("prefill", "prefill", 35, "8 billion parameters, prompts of 2,048 and 32,768 tokens"),
    Stage("check", "checking", 30, "`jackfield check` over the backends that are for a GPU"),
    Stage("tests", "existing_tests", 15, "the tests of `make test` that only run where a GPU is"),
)  # fmt: skip

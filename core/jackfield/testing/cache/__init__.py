"""Checks of caches.

A cache is driven by hand (`driver`), with keys and values that tell whose they are: in scenes, one
thing at a time, and at random (`storm`). Then it runs in engines, whose logits are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jackfield.contracts import TransformersCache
from jackfield.testing.cache import acts, plain, runs
from jackfield.testing.cache.bench import Bench
from jackfield.testing.cache.memory import memory_checks
from jackfield.testing.cache.refusals import refusals
from jackfield.testing.cache.scenes import BEAMS, DRAFTS, Scene, scenes
from jackfield.testing.cache.storm import storm
from jackfield.testing.checks import Check, NotTriedError
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """All of them, from what is small and tells most to engines."""
    bench = Bench(subject)
    for scene in scenes(bench):
        yield _driven(bench, scene)
    yield from _by_dtype(bench)
    yield from memory_checks(bench)
    yield from _storms(bench)
    yield from _models(bench)
    yield from _engines(bench)
    yield from _elsewhere(bench)
    yield from refusals(bench)


def _driven(bench: Bench, scene: Scene) -> Check:
    def run(case: object) -> str | None:
        _by_hand(bench)
        drafts = "drafts" in scene.needs.get("decoding", ())
        name = bench.whole if scene.whole else bench.sharp
        if drafts and not (scene.whole and bench.packed):
            name = bench.taking_back
        with bench.drive(name, what=scene.capability, **scene.needs) as driver:
            scene.run(driver, case)
            driver.judge.check_scale()
            worst = driver.judge.worst
        return f"keys and values off by at most {worst:.2g} of their length" if worst else None

    return Check(scene.name, scene.capability, run, scene.cases)


def _by_hand(bench: Bench) -> None:
    if bench.base == "linear":
        raise NotTriedError("layers with a state have no keys to read back; engine.* run them")


def _by_dtype(bench: Bench) -> Iterator[Check]:
    def of(dtype: str) -> Callable[[Any], str]:
        def run(_: object) -> str:
            what = f"dtypes: {dtype}"
            if bench.base != "linear":
                with bench.drive(bench.base, dtype, what=what) as driver:
                    acts.prompt(driver, 9)
            with runs.engine_of(bench, bench.base, dtype, what=what) as (engine, computed):
                runs.rows(engine)
            return computed.compare(runs.right_for(bench, bench.base, dtype))

        return run

    for dtype in sorted(bench.declared.dtypes):
        yield Check(f"dtypes.{dtype}", f"dtypes: {dtype}", of(dtype))


def _storms(bench: Bench) -> Iterator[Check]:
    declared = bench.declared

    def of(examples: int, **needs: Any) -> Callable[[Any], str]:
        def run(_: object) -> str:
            _by_hand(bench)
            drafts = "drafts" in needs.get("decoding", ())
            return storm(bench, bench.taking_back if drafts else bench.whole, examples, **needs)

        return run

    yield Check("storm.plain", "contract", of(12))
    if declared.forks or declared.rollback:
        both = {**(DRAFTS if declared.rollback else {}), **(BEAMS if declared.forks else {})}
        yield Check("storm.all", "forks, rollback", of(25, decoding=both))


#: model -> the layer types that it needs, and whether it can be packed
MODELS = {
    "grouped_query": ({"full_attention"}, True),
    "multi_query": ({"full_attention"}, True),
    "mixed_head_sizes": ({"full_attention"}, True),
    "sliding_window": ({"sliding_attention"}, True),
    "mixed_windows": ({"full_attention", "sliding_attention"}, True),
    "sinks": ({"full_attention", "sliding_attention"}, True),
    "chunked": ({"full_attention", "chunked_attention"}, False),
    "linear": ({"full_attention", "linear_attention"}, True),
    "convolution": ({"full_attention", "linear_attention"}, True),
    "shared_layers": ({"full_attention", "sliding_attention"}, False),
}


def _models(bench: Bench) -> Iterator[Check]:
    def of(name: str, what: str) -> Callable[[Any], str]:
        def run(_: object) -> str:
            bench.no_packed(name)
            with runs.engine_of(bench, name, what=what) as (engine, computed):
                runs.rows(engine)
                runs.alone(engine)
            return computed.compare(runs.right_for(bench, name, bench.dtype))

        return run

    for name, (kinds, packs) in MODELS.items():
        if kinds <= bench.held and (packs or not bench.packed):
            what = f"layer_types: {', '.join(sorted(kinds))}"
            yield Check(f"engine.{name}", what, of(name, what))


def _engines(bench: Bench) -> Iterator[Check]:
    name = bench.sharp
    declared = bench.declared

    def of(run: runs.Run, model: str = "", what: str = "", **more: Any) -> Callable[[Any], str]:
        def check(case: Any) -> str:
            chosen = model or (bench.taking_back if run is runs.drafts else name)
            given = {**more, **(case if isinstance(case, dict) else {})}
            with runs.engine_of(bench, chosen, what=what, **given) as (engine, computed):
                run(engine)
            return computed.compare(runs.right_for(bench, chosen, bench.dtype))

        return check

    if bench.base != "linear":
        sizes = [{"chunk": n} for n in (7, 3, 1)]
        yield Check("engine.chunks", "contract", of(runs.rows), sizes)
        yield Check("engine.long", "contract", of(runs.long), ({}, {"chunk": 13}))
    yield Check("engine.samples", "contract", of(runs.samples, bench.whole))
    yield Check("engine.cache_salt", "contract", of(runs.salts, bench.whole))
    yield Check("engine.cancelled", "contract", of(runs.cancellations))
    yield Check("engine.failed_step", "contract", of(runs.failures))
    if bench.packed:
        small = {} if bench.small is None else {"cache_implementation": bench.small}
        yield Check("engine.failed_prompts", "contract", of(runs.failures, bench.whole))
        yield Check("engine.filled", "contract", of(runs.filled, bench.whole, **small))
    if bench.packed:
        yield Check("engine.preempted", "contract", of(runs.preemptions))
        yield Check("engine.overlapping", "overlaps", lambda _: runs.overlapping(bench, name))
    if declared.rollback:
        drafts = of(runs.drafts, what="rollback", decoding="prompt_lookup")
        yield Check("engine.drafts", "rollback", drafts)
    if declared.forks:
        yield Check("engine.beams", "forks", of(runs.beams, what="forks", decoding="beam"))
    yield Check("engine.two", "contract", lambda _: runs.two_engines(bench, name))


def _elsewhere(bench: Bench) -> Iterator[Check]:
    declared, backend = bench.declared, bench.subject.backend
    if isinstance(backend, TransformersCache):
        rows = ((5,), (9, 4), (17, 2, 8))
        run = lambda lengths: plain.generated(bench, bench.sharp, lengths)  # noqa: E731
        yield Check("transformers.generate", "contract", run, rows)
    if declared.compiles:
        yield Check("compiles.steps", "compiles", lambda _: plain.compiled(bench, bench.sharp))
    if declared.recordable:
        fixed = lambda rows: plain.recordable(bench, rows)  # noqa: E731
        yield Check("recordable.steps", "recordable", fixed, (1, 3))

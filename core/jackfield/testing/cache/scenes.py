"""Which acts a cache is checked with, by what it declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jackfield.testing.cache import acts
from jackfield.testing.cache.bench import Bench
from jackfield.testing.cache.driver import Driver

DRAFTS = {"plain": "sample", "drafts": "prompt_lookup"}
BEAMS = {"plain": "sample", "beams": "beam"}


@dataclass(frozen=True)
class Scene:
    """Attributes are those of `Check`; `run` is called with a driver and each of `cases`.

    `needs` are further arguments of `jackfield.plan`; `whole`: of a model without windows.
    """

    name: str
    capability: str
    run: Callable[[Driver, Any], None]
    cases: Seq[Any]
    needs: dict[str, Any]
    whole: bool = False


def scenes(bench: Bench) -> Iterator[Scene]:
    """Those for what a backend declares."""
    declared = bench.declared
    yield from _stored(bench)
    if bench.packed:
        yield from _continuous(bench)
    if declared.static_shapes and not bench.packed:
        yield _of("static_shapes.addresses", acts.fixed_addresses, (3, 9), "static_shapes")
    if declared.forks:
        yield _of("forks.copies", acts.forked, (1, 4, 9, 16, 31, 33), "forks", decoding=BEAMS)
    if declared.rollback:
        yield from _rolled_back(bench)


def _of(
    name: str,
    run: Any,
    cases: Seq[Any],
    capability: str = "contract",
    *,
    whole: bool = False,
    **needs: Any,
) -> Scene:
    return Scene(name, capability, run, cases, needs, whole)


def _stored(bench: Bench) -> Iterator[Scene]:
    kinds = f"layer_types: {', '.join(sorted(bench.declared.layer_types))}"
    yield _of("store.prompt", acts.prompt, (1, 2, 3, 5, 9, 17, 33, 40, 70), kinds)
    yield _of("store.decode", acts.decode, (1, 4, 13), kinds)
    yield _of("store.chunks", acts.chunks, (7, 3, 1), kinds)
    yield _of(
        "store.rows", acts.ragged, ((3, 5), (1, 6, 3), (6, 1, 33, 4), (9, 2, 5, 17, 1)), kinds
    )
    yield _of("store.reused", acts.again, (1, 6, 20))
    yield _of("store.after_a_failed_step", acts.failed_step, (3, 9, 40))
    yield _of("store.released_twice", acts.never_admitted, (4,))


def _continuous(bench: Bench) -> Iterator[Scene]:
    """Of sequences that come and go, and share pages."""
    yield _of("continuous.joins", acts.joins, (2, 7, 18))
    yield _of("continuous.waits", acts.waits, (3, 9))
    yield _of("continuous.preempted", acts.preempted, (3, 9, 33))
    yield _of("continuous.cancelled", acts.preempted_and_released, (9,))
    yield _of("prefixes.windows", acts.shared, (6, 33))
    yield _of("prefixes.shared", acts.shared, (6, 16, 32, 37, 70), whole=True)
    yield _of("prefixes.cache_salt", acts.salted, (9, 33, 70), whole=True)
    yield _of("prefixes.after_a_failed_step", acts.failed_step, (9, 40, 70), whole=True)
    small = {} if bench.small is None else {"cache_implementation": bench.small}
    for name, whole in (("store.filled", False), ("prefixes.filled", True)):
        yield _of(name, acts.filled, (9, 33, 50), whole=whole, **small)
    yield _of("prefixes.forget", acts.forgotten, (9, 33, 70), whole=True)


def _rolled_back(bench: Bench) -> Iterator[Scene]:
    what = f"rollback: {', '.join(sorted(bench.declared.rollback))}"
    yield _of(
        "rollback.alone",
        acts.rejected,
        ((1, 1), (1, 0), (3, 0), (3, 2), (4, 4)),
        what,
        decoding=DRAFTS,
    )
    yield _of(
        "rollback.rows",
        acts.rejected_by_row,
        ((6, 9), (1, 7, 4), (3, 31, 2, 5)),
        what,
        decoding=DRAFTS,
    )
    yield _of("rollback.truncate", acts.truncated, ((6, 1), (9, 4), (34, 5)), what, decoding=DRAFTS)
    if bench.packed:
        yield _of(
            "rollback.truncate_shared", acts.truncated_and_shared, (9, 34, 70), what,
            whole=True, decoding=DRAFTS,
        )  # fmt: skip
    if bench.packed and bench.declared.forks:
        both = {**DRAFTS, **BEAMS}
        yield _of("forks.with_drafts", acts.forked_with_drafts, (3, 9, 32), "forks", decoding=both)

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
    declared, packed = bench.declared, bench.packed
    layers = ", ".join(sorted(declared.layer_types))
    kinds = f"layer_types: {layers}"

    def of(
        name: str,
        run: Any,
        cases: Seq[Any],
        capability: str = kinds,
        *,
        whole: bool = False,
        **needs: Any,
    ) -> Scene:
        return Scene(name, capability, run, cases, needs, whole)

    yield of("store.prompt", acts.prompt, (1, 2, 3, 5, 9, 17, 33, 40, 70))
    yield of("store.decode", acts.decode, (1, 4, 13))
    yield of("store.chunks", acts.chunks, (7, 3, 1))
    yield of("store.rows", acts.ragged, ((3, 5), (1, 6, 3), (6, 1, 33, 4), (9, 2, 5, 17, 1)))
    yield of("store.reused", acts.again, (1, 6, 20), "contract")
    yield of("store.after_a_failed_step", acts.failed_step, (3, 9, 40), "contract")
    yield of("store.released_twice", acts.never_admitted, (4,), "contract")
    if packed:
        yield of("continuous.joins", acts.joins, (2, 7, 18), "contract")
        yield of("continuous.waits", acts.waits, (3, 9), "contract")
        yield of("continuous.preempted", acts.preempted, (3, 9, 33), "contract")
        yield of("continuous.cancelled", acts.preempted_and_released, (9,), "contract")
        yield of("prefixes.windows", acts.shared, (6, 33), "contract")
        yield of("prefixes.shared", acts.shared, (6, 16, 32, 37, 70), "contract", whole=True)
        yield of("prefixes.cache_salt", acts.salted, (9, 33, 70), "contract", whole=True)
        yield of(
            "prefixes.after_a_failed_step", acts.failed_step, (9, 40, 70), "contract", whole=True
        )
        small = {} if bench.small is None else {"cache_implementation": bench.small}
        for name, whole in (("store.filled", False), ("prefixes.filled", True)):
            yield of(name, acts.filled, (9, 33, 50), "contract", whole=whole, **small)
        yield of("prefixes.forget", acts.forgotten, (9, 33, 70), "contract", whole=True)
    if declared.static_shapes and not packed:
        yield of("static_shapes.addresses", acts.fixed_addresses, (3, 9), "static_shapes")
    if declared.forks:
        yield of("forks.copies", acts.forked, (1, 4, 9, 16, 31, 33), "forks", decoding=BEAMS)
    back = ", ".join(sorted(declared.rollback))
    if declared.rollback:
        what = f"rollback: {back}"
        yield of(
            "rollback.alone",
            acts.rejected,
            ((1, 1), (1, 0), (3, 0), (3, 2), (4, 4)),
            what,
            decoding=DRAFTS,
        )
        yield of(
            "rollback.rows",
            acts.rejected_by_row,
            ((6, 9), (1, 7, 4), (3, 31, 2, 5)),
            what,
            decoding=DRAFTS,
        )
        yield of(
            "rollback.truncate", acts.truncated, ((6, 1), (9, 4), (34, 5)), what, decoding=DRAFTS
        )
    if declared.rollback and packed:
        yield of(
            "rollback.truncate_shared", acts.truncated_and_shared, (9, 34, 70), what,
            whole=True, decoding=DRAFTS,
        )  # fmt: skip
    if declared.rollback and declared.forks and packed:
        both = {**DRAFTS, **BEAMS}
        yield of("forks.with_drafts", acts.forked_with_drafts, (3, 9, 32), "forks", decoding=both)

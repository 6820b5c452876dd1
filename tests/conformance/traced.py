"""What a trace must add up to, whatever ran in it."""

from __future__ import annotations

import itertools
from typing import Any

from jackfield.engine.engine import Engine
from jackfield.tracing.accounts import Accounts, Record, nested
from jackfield.tracing.recorder import Span
from jackfield.tracing.table import rows


def assert_adds_up(record: Record) -> Accounts:
    """Kinds of work add up to the step and to all the time, none is negative, lives have no gap."""
    found = Accounts.of(record)
    nodes = nested(record.spans)
    assert min((node.host - node.within for node in nodes), default=0) >= 0
    assert all(node.device >= 0 for node in nodes)
    shown = dict(rows(record, found))
    assert min(account.total for account in shown.values()) >= 0
    top = sum(account.total for path, account in shown.items() if len(path) == 1)
    assert top == record.end - record.begin
    for path, account in found.rows.items():
        below = sum(one.total for other, one in shown.items() if other[:-1] == path)
        assert below in (0, account.total)
    for life in record.requests:
        phases = life.phases(record.end)
        assert all(one.end == after.begin for one, after in itertools.pairwise(phases))
        end = record.end if life.end is None else life.end
        assert phases[0].begin == life.changes[0][1] <= end == phases[-1].end
        assert sum(life.spent(name, record.end) for name, _ in dict(life.changes).items()) == (
            end - phases[0].begin
        )
    return found


def steps_of(record: Record) -> list[Span]:
    return [span for span in record.spans if span.work.kind == "steps" and span.detail is not None]


def functions_of(engine: Engine) -> dict[tuple[str, str], int]:
    """Every function that the parts of an engine and its model call of one another, by identity."""
    loop, bound = engine._loop, engine._bound
    parts: dict[str, Any] = {
        "loop": loop, "cache": loop.cache, "scheduler": loop.scheduler, "decoder": loop.decoding,
        "searcher": loop.decoding.searcher, "worker": engine._worker, "intake": engine._intake,
        "observer": engine._assembly.observer, "structures": engine._assembly.structures,
        "bound": bound, "attention": bound.attention, "compiled": bound.compiled,
        **loop.decoding.strategies, **dict(engine.model.named_modules()),
    }  # fmt: skip
    found = {
        (name, attribute): id(value)
        for name, part in parts.items() if part is not None
        for attribute, value in vars(part).items() if callable(value)
    }  # fmt: skip
    forward = bound.attention.forward
    while forward is not None:
        cells = [cell.cell_contents for cell in forward.__closure__ or ()]
        names = dict(zip(forward.__code__.co_freevars, cells, strict=True))
        found |= {
            ("attention", name): id(value) for name, value in names.items() if callable(value)
        }
        forward = names.get("inner") if "understood" in names else None
    return found

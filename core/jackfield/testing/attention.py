"""Checks of attentions."""

from __future__ import annotations

from collections.abc import Iterator

from jackfield.testing.checks import Check
from jackfield.testing.engines import engine_with
from jackfield.testing.models import Reference, build
from jackfield.testing.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    def in_an_engine(_: object) -> str:
        model = build("plain", seed=subject.seed)
        reference = Reference(model)
        with engine_with(subject, model) as (engine, computed):
            engine.generate([[5, 6, 7], [9, 8, 7, 6, 5]], max_new_tokens=8)
        return computed.compare(reference)

    yield Check("engine.logits", "contract", in_an_engine)

"""What checks of both layouts share: every dtype, and heads, groups and windows of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from jackfield.testing.attention import drawn
from jackfield.testing.attention.jobs import Jobs, capabilities_of
from jackfield.testing.attention.judging import Worst
from jackfield.testing.attention.shapes import SHAPES, Shape
from jackfield.testing.checks import Check
from jackfield.testing.subject import Subject

GROUPED = next(shape for shape in SHAPES if shape.title == "grouped_query")
WINDOWED = next(shape for shape in SHAPES if shape.title == "sliding_window")


class Situation:
    """Runs one case after the other on one attention, which is bound `how` `bound_to` is asked."""

    def __init__(self, subject: Subject, jobs: Jobs, shape: Shape, **how: Any) -> None:
        self._subject, self._jobs, self._shape, self._how = subject, jobs, shape, how
        self._worst = Worst()


def usual(subject: Subject) -> Shape:
    """What is asked where nothing depends on the shape."""
    return GROUPED if "grouped_query" in capabilities_of(subject).features else SHAPES[0]


def checks(
    layout: str,
    subject: Subject,
    situation: Callable[..., Callable[[Any], str]],
    some: Seq[Any],
    windows: Seq[Any],
) -> Iterator[Check]:
    """`some` cases of each size and dtype, and those of `windows`.

    `situation(shape, dtype=…, head_dim=…, heads=…)` runs cases.
    """
    can, shape = capabilities_of(subject), usual(subject)
    for dtype in sorted(can.dtypes):
        yield Check(
            f"{layout}.dtype.{dtype}", f"dtypes: {dtype}", situation(shape, dtype=dtype), cases=some
        )
    for size in drawn.head_sizes(subject):
        yield Check(
            f"{layout}.head_size.{size}", f"head_dims: {size}", situation(shape, head_dim=size),
            cases=some,
        )  # fmt: skip
    size = drawn.head_size(subject)
    for heads in drawn.heads(subject):
        yield Check(
            f"{layout}.heads.{drawn.name(heads)}", "contract: any number of heads",
            situation(GROUPED, head_dim=size, heads=heads), cases=some,
        )  # fmt: skip
    if "sliding_window" in can.features:
        yield Check(
            f"{layout}.windows", "features: sliding_window, windows of any size",
            situation(WINDOWED), cases=windows, large=True,
        )  # fmt: skip

"""The checks of attentions: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

from typing import Any

import pytest
from attention import PLAIN, ZOO, of
from right_attention import Right
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield.testing.checks import verdict
from jackfield.testing.subject import uninstalled
from jackfield.testing.suites import checks_of
from jackfield_plugins.attention.cpu_decode import CpuDecodeAttention
from jackfield_plugins.attention.eager import EagerAttention
from jackfield_plugins.attention.flex_attention import FlexAttention
from jackfield_plugins.attention.sdpa import SdpaAttention

SAMPLE = (
    "no scaling", "no softcap", "no sinks", "heads in turn", "not transposed", "ignores the mask",
    "queries begin at 0", "changes its query", "one piece of memory", "no window in pages",
    "pages in a row", "keys gathered once a step", "reads what nobody wrote",
    "calls of a step before", "keeps records in blocks", "sixteen heads", "pages in reverse order",
)  # fmt: skip

FEW = of(
    features=frozenset(), layouts=("padded",), dtypes=frozenset({"float32"}),
    head_dims=frozenset({12, 16}),
)  # fmt: skip


@pytest.mark.long
def test_one_that_can_do_little_passes() -> None:
    """What it does not declare is refused, and counts as that."""
    found = judged(FEW)
    assert_right(found)
    assert sum(one.outcome == "refused" for one in found) > 10


@pytest.mark.long
@pytest.mark.parametrize(
    "backend",
    [Right, of(features=PLAIN, layouts=("packed",)), SdpaAttention, EagerAttention, FlexAttention,
     CpuDecodeAttention],
    ids=["right", "pages only", "sdpa", "eager", "flex", "cpu_decode"],
)  # fmt: skip
def test_right_ones_pass(backend: Any) -> None:
    assert_right(judged(backend))


def test_native_calls_of_a_right_one_pass() -> None:
    """The whole of them is a long test; these call what steps without Python call."""
    with uninstalled(CpuDecodeAttention()) as subject:
        own = [
            c
            for c in checks_of(subject)
            if c.name in ("packed.decode.plain", "packed.drafts.plain")
        ]
        assert [verdict(check).outcome for check in own] == ["passed", "passed"]


@pytest.mark.parametrize("wrong", sampled(ZOO, SAMPLE), ids=str)
@pytest.mark.one_in(6)
def test_a_wrong_attention_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)

"""``sample``: one token at a time, greedy or sampled, each request by its own settings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from jackfield import hookimpl
from jackfield.contracts import (
    SAMPLER_SETTINGS,
    BindContext,
    Decoding,
    DecodingCapabilities,
    Strategy,
)

if TYPE_CHECKING:
    from jackfield.contracts import Sequence


class Sample(Decoding):
    """Plain decoding: no drafts, one token a step."""

    name = "sample"
    auto_rank = 10
    capabilities = DecodingCapabilities(settings=SAMPLER_SETTINGS)

    def bind(self, context: BindContext) -> Strategy:
        return NoDrafts()


class NoDrafts(Strategy):
    """Leaves it all to the sampler."""

    def propose(self, sequences: Seq[Sequence], max_drafts: Seq[int]) -> list[list[int]]:
        return [[] for _ in sequences]


@hookimpl
def jackfield_decoding() -> list[Decoding]:
    return [Sample()]

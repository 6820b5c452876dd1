"""Which models stand for which feature, and what a call for them needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jackfield.testing.attention.rows import Needs
from jackfield.testing.models import WINDOW


@dataclass(frozen=True)
class Shape:
    """A feature as it is checked.

    Attributes:
        title: In the names of checks.
        feature: A key of `FEATURES`; "" is none.
        model: A key of `MODELS`, whose attention modules are handed over.
        own: What a call needs, from the sharpest up.
        packed: Whether the packed layout has a place for it.
        padded: The same of the padded one.
        beside: Another feature that it needs.
    """

    title: str
    feature: str
    model: str
    own: tuple[Needs, ...] = (Needs(),)
    packed: bool = True
    padded: bool = True
    beside: str = ""

    def declared(self, features: frozenset[str]) -> bool:
        """Whether an attention with these features has what it needs."""
        return {self.feature, self.beside} - {""} <= features

    def needs(self, declared: frozenset[str]) -> list[Needs]:
        """What calls need: the feature alone, and with a window where that is declared too."""
        found = list(self.own)
        if self.feature in ("softcap", "sinks") and "sliding_window" in declared:
            found.append(replace(self.own[-1], window=WINDOW))
        return found


SHAPES = (
    Shape("plain", "", "plain", (Needs(), Needs(scaling=1.3))),
    Shape("grouped_query", "grouped_query", "grouped_query"),
    Shape("multi_query", "grouped_query", "multi_query"),
    Shape("mixed_head_sizes", "mixed_head_sizes", "mixed_head_sizes"),
    Shape(
        "sliding_window", "sliding_window", "sliding_window",
        (Needs(window=1), Needs(window=WINDOW)),
    ),
    Shape("chunked", "chunked", "chunked", (Needs(chunk=WINDOW),), packed=False),
    Shape("softcap", "softcap", "softcap", (Needs(softcap=0.05), Needs(softcap=1.5))),
    Shape("sinks", "sinks", "sinks", (Needs(sinks=True),)),
    Shape("position_bias", "position_bias", "plain", (Needs(bias=True),), packed=False),
    Shape(
        "bidirectional_prefix", "bidirectional_prefix", "bidirectional_prefix",
        (Needs(prefix=5),), packed=False,
    ),
    Shape(
        "bidirectional_blocks", "bidirectional_blocks", "plain",
        (Needs(block=3), Needs(block=40)), padded=False,
    ),
    Shape(
        "bidirectional_blocks_in_windows", "bidirectional_blocks", "sliding_window",
        (Needs(block=3, window=WINDOW), Needs(block=3 * WINDOW, window=WINDOW)),
        padded=False, beside="sliding_window",
    ),
    Shape("own_mask", "own_mask", "own_mask", (Needs(own_mask=True),), packed=False),
)  # fmt: skip

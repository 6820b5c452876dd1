"""What a cache hands to the engine: the arguments of one forward call, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.contracts.packed import Blocks, PageTables

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class FixedStep:
    """Where all decode steps of up to so many sequences lie: at the same addresses each time.

    Rows after the last sequence are padding: a token 0 at position 0, whose keys and values go to
    a page that no sequence has.

    Lives: until `loosen` or `close`; each `prepare` that lays a step out here changes the numbers.

    Attributes:
        input_ids: int64 `[1, rows]` on the model's device.
        position_ids: The same.
        tables: What the layers of each window read. Their `tables` and `firsts` have the rows of
            the last step that was prepared, their spans the most that can be.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    tables: Seq[PageTables]

    @property
    def rows(self) -> int:
        """How many sequences a step can have here."""
        return self.input_ids.shape[1]


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The keyword arguments of one forward call.

    The model's logits become `[rows, k, vocab]`. The last `k` positions of a row line up with the
    last `k` tokens of the sequence that the row is for; `k` is at least 1 + the most drafts of one.

    Lives: until the next `prepare`. The engine changes nothing in it, but for the `input_ids` of a
    cache that `overlaps`.

    Attributes:
        kwargs: What the model is called with. Of these, `position_ids` and `logits_to_keep` are
            left out for models that do not take them.
        rows: How many rows the logits have.
        row_of: int64 `[scheduled]` on the model's device: `row_of[i]` is the row of
            `step.scheduled[i]`. None: that is row i.
        decode: Whether every sequence feeds one token and its drafts: `step.decode`.
        fixed: Where the step lies, in the first columns, at a place that `fix` made; tensors of
            `kwargs` are views of it. None: it lies anywhere.
        blocks: Window of layers -> their queries that see later keys, for `PageTables.blocks`;
            caches leave it out, the engine adds it. None: all look back only.
    """

    kwargs: dict[str, Any]
    rows: int
    row_of: torch.Tensor | None = None
    decode: bool = False
    fixed: FixedStep | None = None
    blocks: Mapping[int | None, Blocks] | None = None


@dataclass(frozen=True, kw_only=True)
class CacheUsage:
    """What a cache holds now, and what it has done since it was made.

    Attributes:
        pages: How many pages there are.
        pages_used: Those that running sequences hold.
        pages_kept: Those that nobody holds, kept for a later prompt that begins alike. The rest of
            `pages` is free.
        page_size: Tokens of a page.
        prompt_tokens: Prompt tokens of all sequences that entered.
        prefix_tokens: How many of these were there already.
        swapped: Sequences that were preempted and wait in host memory.
        num_bytes: Memory of the pools, in bytes.
        not_swapped: How often there was no room in host memory, and one is computed again.
    """

    pages: int
    pages_used: int
    pages_kept: int
    page_size: int
    prompt_tokens: int
    prefix_tokens: int
    swapped: int
    num_bytes: int
    not_swapped: int = 0

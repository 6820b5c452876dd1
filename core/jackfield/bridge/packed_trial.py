"""Texts with images in the packed layout, read by a small model on the CPU without a cache of ours.

All rows are in one, and each has a page of its own that is longer than any text. The model's own
attention goes row by row over them, with the masks that `PackedLayer` makes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.forward import forward_of
from jackfield.bridge.image_steps import Row, Shown, blocks_of, fed
from jackfield.bridge.model_attention import model_attention
from jackfield.bridge.model_layers import layer_types, windows
from jackfield.bridge.probe import shared_layers
from jackfield.bridge.recomputation import attending
from jackfield.bridge.requirements import probed
from jackfield.contracts import ModelInputs, PackedLayer, PackedStep, PageTables, Span
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.bridge.image_encoder import ImageEncoder
    from jackfield.contracts import BoundAttention


def packed_logits(
    model: PreTrainedModel,
    encoder: ImageEncoder,
    rows: Seq[tuple[list[int], Shown]],
    blocks_in: Set[str],
    piece: int | None = None,
) -> torch.Tensor:
    """The logits of all tokens, row by row: `[tokens, vocab]`.

    `encoder` is the one that read the images, whose tokens see one another in layers of the types
    `blocks_in`. Each step reads `piece` tokens of a row, or less, or an image that is longer; None:
    all. Raises ExecutionError for a model whose attention is part of its code.
    """
    eager = model_attention(model)
    if eager is None:
        raise ExecutionError(f"{type(model).__name__} has its attention in its own code")
    pages = _Pages(model, eager, max(len(ids) for ids, _ in rows), len(rows))
    forward = forward_of(model)
    said: list[list[torch.Tensor]] = [[] for _ in rows]
    begins = [0] * len(rows)
    with attending(model, pages.forward, eager.mask):
        while any(begin < len(ids) for begin, (ids, _) in zip(begins, rows, strict=True)):
            fed_rows = []
            for number, (ids, shown) in enumerate(rows):
                begin = begins[number]
                end = begins[number] = _end(shown, begin, len(ids), piece)
                if begin < end:
                    fed_rows.append(Row(ids[begin:end], begin, shown, number))
            logits = forward(ModelInputs(pages.lay_out(fed_rows, encoder, blocks_in), 1))[0]
            parts = logits.split([len(row.ids) for row in fed_rows])
            for row, part in zip(fed_rows, parts, strict=True):
                said[row.number].append(part)
    return torch.cat([part for parts in said for part in parts])


def _end(shown: Shown, begin: int, length: int, piece: int | None) -> int:
    """How far a row is read in a step that begins with its token `begin`."""
    if begin == length:
        return length
    end = shown.whole(begin, min(length, begin + (piece or length)))
    return shown.behind(begin) if end == begin else end


class _Pages:
    """Keys and values of `count` rows in all layers, up to `longest` tokens of each."""

    def __init__(
        self, model: PreTrainedModel, eager: BoundAttention, longest: int, count: int
    ) -> None:
        assert eager.packed is not None
        self._attend = eager.packed
        self._size, self._count = longest, count
        self._windows = windows(model.config)
        self._types = layer_types(model.config)
        self._sources = dict(shared_layers(probed(model).calls, len(self._types)))
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tables: dict[int, PageTables] = {}  # of the step, by layer

    def lay_out(self, rows: Seq[Row], encoder: ImageEncoder, blocks_in: Set[str]) -> dict[str, Any]:
        """The arguments of a step with these rows, whose keys and values are to come."""
        ids = [token for row in rows for token in row.ids]
        positions = torch.tensor([[at for row in rows for at in range(row.start, row.end)]])
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row.ids))
        spans = [Span(at, len(row.ids), row.end) for at, row in zip(starts, rows, strict=False)]
        lengths = [row.end for row in rows]
        step = PackedStep(
            spans,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            max(len(row.ids) for row in rows),
            max(lengths),
        )
        pages = [[row.number] for row in rows]
        blocks = blocks_of(rows, positions.device)
        for layer, (window, kind) in enumerate(zip(self._windows, self._types, strict=True)):
            self._tables[layer] = PageTables(
                step, window, self._size, torch.tensor(pages, dtype=torch.int32),
                torch.zeros(len(rows), dtype=torch.int32), pages, [0] * len(rows),
                blocks=blocks if kind in blocks_in else None,
            )  # fmt: skip
        kwargs = {
            "input_ids": torch.tensor([ids]),
            "position_ids": positions,
            "use_cache": False,
            "logits_to_keep": len(ids),
        }
        return kwargs | fed(encoder, rows, positions)

    def forward(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Store what a layer is handed, and attend to what is there."""
        number = self._sources.get(module.layer_idx, module.layer_idx)
        tables, pools = self._tables[number], self._pools.get(number)
        if pools is None:
            shape = self._count, self._size
            pools = self._pools[number] = (
                key.new_zeros(*shape, key.shape[1], key.shape[3]),
                value.new_zeros(*shape, value.shape[1], value.shape[3]),
            )
        for span, (page,) in zip(tables.step.spans, tables.tables, strict=True):
            own = slice(span.query_start, span.query_start + span.query_len)
            there = slice(span.kv_len - span.query_len, span.kv_len)
            for pool, states in zip(pools, (key, value), strict=True):
                pool[page, there] = states[0, :, own].transpose(0, 1)
        layer = PackedLayer(*pools, tables)
        return self._attend(module, query[0].transpose(0, 1), layer, **kwargs)[None], None

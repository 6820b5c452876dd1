"""How a step of the packed layout becomes tensors: one row of tokens, and where they go."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from jackfield.contracts import ModelInputs, PackedStep, Span, StepBlock
from jackfield_plugins.cache.paged.tables import CachedTensor

if TYPE_CHECKING:
    from jackfield.contracts import Step
    from jackfield_plugins.cache.paged.groups import LayerGroup


class StepLayout:
    """Lays out steps for the layers of `groups`, all numbers in one copy to the device."""

    def __init__(self, groups: Collection[LayerGroup], device: torch.device) -> None:
        self._groups = groups
        self.block = StepBlock(device)
        self._starts = CachedTensor()

    def inputs(self, step: Step) -> tuple[ModelInputs, int]:
        """What the model is called with, and how many tokens these are; pages are reserved."""
        try:
            return self._inputs(step)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Make all anew in the next step: what was put in this one may never have been sent."""
        self._starts = CachedTensor()
        for group in self._groups:
            group.forget_tables()

    def _inputs(self, step: Step) -> tuple[ModelInputs, int]:
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        for item in step.scheduled:
            start, tokens = item.start, item.token_ids
            spans.append(Span(len(ids), len(tokens), start + len(tokens)))
            ids += tokens
            positions += range(start, start + len(tokens))
        packed = self._packed_step(spans)
        numbers = [item.sequence.id for item in step.scheduled]
        slots = [group.lay_out(numbers, packed, self.block) for group in self._groups]
        # One tensor for all that changes with every step: a small one costs as much as its call.
        table = self.block.put([ids, positions, *slots])
        for row, group in enumerate(self._groups):
            group.targets = table[2 + row]
        keep = 1 + max(len(item.drafts) for item in step.scheduled)
        kwargs: dict[str, Any] = {
            "input_ids": table[:1],
            "position_ids": table[1:2],
            "use_cache": False,
            "logits_to_keep": self._wanted(spans, keep, len(ids)),
        }
        self.block.send()
        return ModelInputs(kwargs, rows=len(spans), decode=step.decode), len(ids)

    def _wanted(self, spans: list[Span], keep: int, tokens: int) -> int | torch.Tensor:
        """Which logits to compute: of the last `keep` tokens of every sequence.

        A number where these are the step's last tokens, as with one sequence and while all decode:
        models slice by it, which is cheaper than picking rows.
        """
        if len(spans) == 1 or tokens == len(spans):
            return keep * len(spans)
        last = [max(0, s.query_start + s.query_len - keep + i) for s in spans for i in range(keep)]
        return self.block.put(last)

    def _packed_step(self, spans: list[Span]) -> PackedStep:
        starts = [span.query_start for span in spans] + [
            spans[-1].query_start + spans[-1].query_len
        ]
        return PackedStep(
            spans,
            self._starts(starts, self.block),
            self.block.put([s.kv_len for s in spans], torch.int32),
            max([span.query_len for span in spans]),
            max([span.kv_len for span in spans]),
        )

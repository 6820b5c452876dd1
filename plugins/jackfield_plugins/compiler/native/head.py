"""The product at the end of a step: logits of all tokens, or of those that are asked for.

Of a prompt the last token's logits are enough, and a vocabulary's weights are a good part of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from jackfield_plugins.compiler.native.calls import Run, Stretch

if TYPE_CHECKING:
    from jackfield.contracts import NativeCall

#: From where logits go, `[1, columns, vocab]`, and what they are made of to the call that does it.
Make = Callable[[torch.Tensor, torch.Tensor], "NativeCall | None"]


class Head:
    """`make` makes the calls; those of all columns compute `logits` of `hidden`."""

    def __init__(
        self, make: Make, hidden: torch.Tensor, logits: torch.Tensor, whole: NativeCall, run: Run
    ) -> None:
        self._make, self._hidden, self._logits, self._run = make, hidden, logits, run
        self._whole = self._ready(whole)
        self._some: dict[int, tuple[torch.Tensor, torch.Tensor, Stretch] | None] = {}

    def __call__(self, keep: torch.Tensor | None) -> torch.Tensor:
        """Logits of all columns, or of `keep`; overwritten by the next call."""
        if keep is None:
            self._whole()
            return self._logits
        count = len(keep)
        if count not in self._some:
            self._some[count] = self._of(count)
        if (some := self._some[count]) is None:
            self._whole()
            return self._logits[:, keep]
        hidden, logits, run = some
        torch.index_select(self._hidden, 1, keep, out=hidden)
        run()
        return logits

    def _of(self, count: int) -> tuple[torch.Tensor, torch.Tensor, Stretch] | None:
        """The logits of some lie where those of all would; None: no call computes them alone."""
        if len(self._logits) != 1 or count > self._logits.shape[1]:
            return None
        logits = self._logits[:, :count]
        hidden = self._hidden.new_empty(1, count, self._hidden.shape[2])
        call = self._make(logits, hidden)
        return None if call is None else (hidden, logits, self._ready(call))

    def _ready(self, call: NativeCall) -> Stretch:
        stretch = Stretch(self._run)
        stretch.add("the last product", call)
        stretch.close()
        return stretch

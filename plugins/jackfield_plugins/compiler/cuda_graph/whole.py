"""A step that is recorded whole, its attentions and what they read and write included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from jackfield_plugins.compiler.cuda_graph.stretches import Record


#: As often may a size be recorded anew because a tensor has moved.
AGAIN = 8


class Recording(NamedTuple):
    """A step of one size at one place."""

    addresses: list[int]  # of the tensors that it reads
    result: Any
    play: Callable[[], None]


class Whole:
    """`run`, a step, as one recording for each size of its inputs.

    Every tensor is read where it lies, and looked at in each call: where one is not where it was
    recorded, the step is recorded anew, a few times. `recorded`: that happened since somebody set
    it to False. `last`: the one that was played.
    """

    def __init__(self, run: Callable[..., Any], record: Record, example: Any) -> None:
        self.recorded = False
        self.last: Recording | None = None
        self._run = run
        self._record = record
        kinds = [isinstance(one, torch.Tensor) for one in example]
        self._tensors = [at for at, tensor in enumerate(kinds) if tensor]
        self._sizes = [at for at, tensor in enumerate(kinds) if not tensor]
        self._recordings: dict[tuple[Any, ...], Recording] = {}
        self._times: Counter[tuple[Any, ...]] = Counter()

    def close(self) -> None:
        self._recordings.clear()
        self._times.clear()
        self.last = None

    def __call__(self, *inputs: Any) -> Any:
        size = tuple([inputs[at] for at in self._sizes])
        addresses = [inputs[at].data_ptr() for at in self._tensors]
        found = self._recordings.get(size)
        if found is None or found.addresses != addresses:
            self._recordings.pop(size, None)  # its memory is free for the next one
            found = self.last = None
            if self._times[size] > AGAIN:
                raise ExecutionError(f"a step lies elsewhere than {AGAIN} recordings of it read")
            self._times[size] += 1
            result, play = self._record(lambda: self._run(*inputs))
            found = self._recordings[size] = Recording(addresses, result, play)
            self.recorded = True
        self.last = found
        found.play()
        return found.result

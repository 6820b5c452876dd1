"""How ids, lengths and tables of a step are copied to the device, without a wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ALIGNED = 16  # bytes, as much as the widest number and a half
_SMALLEST = 1 << 14
_MOST = 8  # blocks; two are enough while each step's tokens are read before the next


class StepBlock:
    """Collects tensors of the host for one device, and sends all of them in one copy.

    `torch.tensor(numbers, device="cuda")` waits until the device has done all earlier work, since
    the copy is from pageable memory. Here numbers are written into one of
    several page-locked blocks in turn, whose copy is begun and not awaited; `put` returns a view of
    where they will be. A block is written again when its last copy is done; where none is free,
    there is one more, up to a few. On a CPU nothing is pinned and nothing copied: `put` is
    `torch.tensor`, and `send` does nothing.

    Not thread-safe. Copies are in order with the other work of the current stream.

    Attributes:
        device: Where numbers go.
        stages: Whether numbers are sent (a GPU), and not just there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stages = device.type == "cuda"
        self._blocks: deque[_Block] = deque()  # that longest in use first
        self._used = 0
        self._there: Any = None  # the block's place on the device, while something waits in it
        self._given = False  # whether that place is the caller's

    def into(self, memory: torch.Tensor) -> None:
        """Have what is put until the next `send` lie in `memory`, from its beginning.

        `memory` is uint8 `[bytes]` on the device, with room for all of it. So what is put in the
        same order and sizes each time lies at the same addresses, also on a CPU.
        """
        self.send()
        if self.stages:
            self._open(memory.numel())
        self._there, self._given = memory, True

    def put(self, numbers: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of numbers on the device.

        Lives: read it after the next `send`, not before; do not change it.

        Args:
            numbers: Nested lists, or a tensor of the host.
            dtype: Of the new tensor; None: as `torch.tensor` chooses. A given tensor keeps its own.
        """
        import torch

        made = isinstance(numbers, torch.Tensor)
        if not (self.stages or self._given):
            if made:
                return numbers.to(self.device)  # type: ignore[no-any-return]
            return torch.tensor(numbers, dtype=dtype, device=self.device)
        given = numbers if made else torch.tensor(numbers, dtype=dtype, device="cpu")
        begin = -(-self._used // _ALIGNED) * _ALIGNED
        end = begin + given.numel() * given.element_size()
        if self._there is None or end > self._there.numel():
            if self._given:
                raise ValueError(f"{end} bytes are put where {self._there.numel()} have room")
            self.send()
            begin, end = 0, end - begin
            self._open(end)
            room = self._blocks[-1].memory.numel()
            self._there = torch.empty(room, dtype=torch.uint8, device=self.device)
        self._used = end
        there = self._there[begin:end]
        here = self._blocks[-1].memory[begin:end] if self.stages else there
        here.view(given.dtype).view(given.shape).copy_(given)
        return there.view(given.dtype).view(given.shape)  # type: ignore[no-any-return]

    def _open(self, size: int) -> None:
        """Have the block that is longest in use as the last one, with room for `size` bytes."""
        if self._blocks and (self._blocks[0].free() or len(self._blocks) == _MOST):
            self._blocks.rotate(-1)
        else:
            self._blocks.append(_Block())
        self._blocks[-1].open(size)

    def send(self) -> None:
        """Begin the copy of all that was put since the last one."""
        if self._there is not None:
            there, used = self._there, self._used
            self._there, self._used, self._given = None, 0, False  # also where it fails
            if self.stages:
                self._blocks[-1].send(there, used)


class _Block:
    """Page-locked `memory`, and until when the device reads it."""

    def __init__(self) -> None:
        import torch

        self.memory = torch.empty(0, dtype=torch.uint8)
        self._sent: Any = None  # the event of its last copy

    def free(self) -> bool:
        return self._sent is None or bool(self._sent.query())

    def open(self, size: int) -> None:
        """Make it free to be written, with room for `size` bytes."""
        import torch

        if self._sent is not None:
            self._sent.synchronize()
        if self.memory.numel() < size:
            room = max(_SMALLEST, 1 << (size - 1).bit_length())
            self.memory = torch.empty(room, dtype=torch.uint8, pin_memory=True, device="cpu")

    def send(self, there: torch.Tensor, size: int) -> None:
        import torch

        there[:size].copy_(self.memory[:size], non_blocking=True)
        if self._sent is None:
            self._sent = torch.cuda.Event()
        self._sent.record(torch.cuda.current_stream(there.device))

"""torch's choice among its attention kernels, which is one for the whole process.

Flags and order are torch's own and no thread's, so what one engine needs is set under a lock, and
what was there before is put back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[..., torch.Tensor]

#: cuDNN, which torch asks first on Hopper, makes a plan for every length of keys and for every
#: thread, which takes longer than the attention; so it is asked last of the fused ones.
ORDER = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)

_ENABLED = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


class _Flags:
    """Who needs torch's flags to be what. `pinned` engines change them for each of their calls."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pinned = 0
        self._ordered = 0
        self._before = contextlib.ExitStack()

    def order(self, gpu: str) -> Callable[[], None]:
        """Have torch go by `ORDER`, of what is enabled, until the last one who asked lets go."""
        with self.lock:
            if not self._ordered:
                _let_torch_order(gpu)
                enabled = [backend for backend in ORDER if _ENABLED[backend]()]  # type: ignore[no-untyped-call]
                if enabled:
                    self._before.enter_context(sdpa_kernel(enabled, set_priority=True))
            self._ordered += 1
        return _once(self._disorder)

    def _disorder(self) -> None:
        with self.lock:
            self._ordered -= 1
            if not self._ordered:
                self._before.close()

    def pin(self) -> Callable[[], None]:
        with self.lock:
            self.pinned += 1
        return _once(self._unpin)

    def _unpin(self) -> None:
        with self.lock:
            self.pinned -= 1


_flags = _Flags()


def _let_torch_order(gpu: str) -> None:
    """Have torch set its own order for `gpu`, which it does at the first call of a process.

    Whatever order was asked for before that call is lost (`priority_order` in sdp_utils.cpp).
    """
    with contextlib.suppress(RuntimeError):  # where all kernels are off for such a call
        one = torch.zeros(1, 1, 1, 8, device=gpu)
        scaled_dot_product_attention(one, one, one)


def free_choice(gpu: str | None) -> tuple[Attend, Callable[[], None] | None]:
    """torch's function, which picks a kernel for each call; and what puts its order back.

    `gpu`: the one where it computes; None: none of CUDA's.
    """

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not _flags.pinned:
            return scaled_dot_product_attention(*args, **kwargs)
        with _flags.lock:  # else it might see what another engine pins
            return scaled_dot_product_attention(*args, **kwargs)

    return attend, None if gpu is None else _flags.order(gpu)


def pinned(name: str) -> tuple[Attend, Callable[[], None]]:
    """torch's function with the kernel of this name and no other; and what ends the pinning."""
    chosen = getattr(SDPBackend, name)

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _flags.lock, sdpa_kernel(chosen):
            return scaled_dot_product_attention(*args, **kwargs)

    return attend, _flags.pin()


def _once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]

    def done() -> None:
        while left:
            left.pop()()

    return done

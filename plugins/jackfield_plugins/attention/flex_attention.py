"""``flex_attention``: torch's attention with masks and scores given as functions.

The method is FlexAttention (Dong et al. 2024, arXiv:2412.05496): compiled, the functions become
part of one fused kernel that skips blocks of which nothing is seen. Uncompiled, torch evaluates
the same definition on the whole matrix of scores, in any dtype and for any head size.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jackfield import hookimpl
from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    BindContext,
    BoundAttention,
    Requirements,
)

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    Attend = Callable[..., Any]

SMALLEST_COMPILED_HEAD = 16  # what a matrix unit takes

#: A graph for each of: one row or many, one query or many, padding or none, window or none; and for
#: each head size. torch's own limit is 8, after which it would run uncompiled.
MAX_GRAPHS = 64


@dataclass(frozen=True)
class FlexOptions:
    """`compile`: run the fused kernel. "auto" does so on a GPU, where it pays."""

    compile: Literal["auto", "true", "false"] = "auto"

    def compiles_on(self, device: str | None) -> bool:
        if self.compile == "auto":
            return device in ("cuda", "xpu")
        return self.compile == "true"


class FlexAttention(Attention):
    """Window, chunks and padding are in the block mask; softcap is a function of a score.

    Sinks are applied to the result, by its log-sum-exp.
    """

    name = "flex_attention"
    options = FlexOptions
    capabilities = AttentionCapabilities(
        devices=frozenset({"cpu", "cuda", "xpu"}),
        features=frozenset(
            {
                "bidirectional_prefix",
                "chunked",
                "grouped_query",
                "mixed_head_sizes",
                "sinks",
                "sliding_window",
                "softcap",
            }
        ),
    )

    def refuse(self, requirements: Requirements, options: Any) -> list[str]:
        reasons = super().refuse(requirements, options)
        if not reasons and "flex" in requirements.model_declines:
            name = requirements.architecture
            reasons.append(f"{name} declares that it must not run with flex attention")
        if options.compiles_on(requirements.device):
            reasons += _refuse_compiled(requirements)
        return reasons

    def bind(self, context: BindContext) -> BoundAttention:
        import torch

        options, device = context.options, context.requirements.device
        source = f"flex_attention of torch {torch.__version__}"
        if device is not None:
            source += ", compiled" if options.compiles_on(device) else ", not compiled"
        return BoundAttention(
            _forward(options.compiles_on), _mask(options.compiles_on), source=source
        )


def _forward(compiles_on: Callable[[str], bool]) -> Attend:
    """The attention function; `compiles_on` says for a device type which form to call."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    fused, plain = _fused(flex_attention), _plain(flex_attention)

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: BlockMask,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if not isinstance(attention_mask, BlockMask):
            raise TypeError(
                "flex_attention takes the block mask that its mask function makes, not "
                f"{type(attention_mask).__name__}"
            )
        compiled = compiles_on(query.device.type)
        group = query.shape[1] // key.shape[1]
        if compiled and group & (group - 1):  # the fused kernel takes powers of two only
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        found = (fused if compiled else plain)(
            query,
            key,
            value,
            score_mod=_capped(softcap) if softcap else None,
            block_mask=attention_mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=None if s_aux is None else AuxRequest(lse=True),
        )
        output = found if s_aux is None else _with_sinks(*found, sinks=s_aux)
        return output.transpose(1, 2).contiguous(), None

    return forward


def _mask(compiles_on: Callable[[str], bool]) -> Callable[..., BlockMask]:
    """The mask function that belongs to it, with the signature of transformers' own."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    fused = _fused(create_block_mask)

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> BlockMask:
        seen = _seen(mask_function, attention_mask, kv_length, q_offset, kv_offset, device)
        # Uncompiled, this makes one bool for each query and key before it sums up blocks.
        create = fused if compiles_on(torch.device(device).type) else create_block_mask
        made: BlockMask = create(seen, batch_size, None, q_length, kv_length, device)
        return made

    return mask


def _refuse_compiled(requirements: Requirements) -> list[str]:
    """What the fused kernel cannot do and the plain evaluation can."""
    reasons = []
    hint = "use 'flex_attention?compile=false'"
    if requirements.dtype == "float64":
        reasons.append(f"its compiled kernel takes no float64; {hint}")
    small = min(requirements.head_dims, default=SMALLEST_COMPILED_HEAD)
    if small < SMALLEST_COMPILED_HEAD:
        at_least = SMALLEST_COMPILED_HEAD
        reasons.append(
            f"its compiled kernel takes heads of {at_least} or more, not {small}; {hint}"
        )
    if requirements.device == "cpu":
        # torch 2.13: no log-sum-exp, C++ that does not compile, indices out of bounds with padding.
        reasons.append(f"torch's compiled kernel for the CPU fails on padded batches; {hint}")
    return reasons


def _seen(
    mask_function: Callable[..., Any] | None,
    attention_mask: torch.Tensor | None,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    device: torch.device | str,
) -> Callable[..., Any]:
    """`mask_function` and padding as a function of positions in the tensors at hand.

    Offsets are tensors: as numbers, each step would be compiled anew. And copies: a static cache
    counts on in its own tensor before the kernel asks for the mask.
    """
    from torch.nn.functional import pad
    from transformers.masking_utils import causal_mask_function

    inner = causal_mask_function if mask_function is None else mask_function
    q_from, kv_from = (_placed(at, device) for at in (q_offset, kv_offset))
    if attention_mask is None:
        return lambda b, h, q, kv: inner(b, h, q + q_from, kv + kv_from)
    # A static cache has columns that are not written yet; they count as padding.
    missing = kv_length + int(kv_offset) - attention_mask.shape[1]
    valid = pad(attention_mask.bool(), (0, max(0, missing)))
    return lambda b, h, q, kv: inner(b, h, q + q_from, kv + kv_from) & valid[b, kv + kv_from]


def _placed(number: Any, device: torch.device | str) -> torch.Tensor:
    """A tensor of its own, int64 `[]`. A number is filled in there: nobody waits for a copy."""
    import torch

    if isinstance(number, torch.Tensor):
        return number.to(device, copy=True)
    return torch.full((), number, dtype=torch.int64, device=device)


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    """One function for each cap, so that nothing is compiled twice."""
    import torch

    def capped(score: torch.Tensor, *position: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _with_sinks(output: torch.Tensor, aux: Any, *, sinks: torch.Tensor) -> torch.Tensor:
    """The output with one more score per head in the sum: exp(lse) / (exp(lse) + exp(sink)) of it.

    That quotient is sigmoid(lse - sink), which neither overflows nor divides zero by zero.
    """
    lse: torch.Tensor = aux.lse
    share = (lse - sinks.to(lse.dtype)[None, :, None]).sigmoid()
    return (output * share[..., None]).to(output.dtype)


def _fused(function: Callable[..., Any]) -> Attend:
    """`function`, compiled; an error rather than an uncompiled run where that is not possible."""
    import torch

    compiled = torch.compile(function, fullgraph=True)

    def attend(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            return compiled(*args, **kwargs)

    return attend


def _plain(function: Callable[..., Any]) -> Attend:
    def attend(*args: Any, **kwargs: Any) -> Any:
        with _uncompiled():
            return function(*args, **kwargs)

    return attend


_lock = threading.Lock()
_running = 0
_before = False


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let torch evaluate flex attention as written.

    Without this switch of torch's, an uncompiled call traces the functions anew each time, and
    warns. It is for the whole process, so it goes back when the last of several threads is done.
    """
    global _running, _before
    from torch.nn.attention import flex_attention as module

    with _lock:
        _before = _before if _running else module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
        _running += 1
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = _running > 0 or _before


@hookimpl
def jackfield_attention() -> list[Attention]:
    return [FlexAttention()]

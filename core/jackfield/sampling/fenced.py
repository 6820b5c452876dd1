"""What a request brought along, run so that it can harm no request but its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from jackfield.errors import error_text
from jackfield.requests.text_errors import failed
from jackfield.requests.token_settings import AllowedByPrefix
from jackfield.sampling.left_on import left_on, surroundings

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: thread -> what of a request it is inside of, for whoever asks why a step takes so long
_inside: dict[int, str] = {}


_LEFT = "it left {} on in torch, for all that runs after it; use a `with` block"


class OwnFailure(Exception):  # noqa: N818 - no error of the engine: it ends one request
    """Something that a request brought along failed; the text is the error of that request."""


def fenced(what: str, request: int, act: Callable[[], T]) -> T:
    """What `act`, the `what` of a request, returns. Raises OwnFailure, whatever `act` raises.

    Also SystemExit and its like: in a thread of ours they ask nobody to end but the request. What
    it leaves on in torch, as a default device, is put back and is an error as well.
    """
    thread = threading.get_ident()
    _inside[thread] = f"the {what} of request {request}"
    before = surroundings()
    try:
        found = act()
    except BaseException as error:
        left = left_on(before)
        why = _LEFT.format(left) if left else error_text(error)
        raise OwnFailure(failed(what, why)) from error
    finally:
        _inside.pop(thread, None)
    if left := left_on(before):
        raise OwnFailure(failed(what, _LEFT.format(left)))
    return found


def request_code_of(thread: int | None) -> str | None:
    """What of a request a thread is inside of now; None: nothing."""
    return None if thread is None else _inside.get(thread)


def processed(
    request: int,
    processors: Seq[Callable[..., torch.Tensor]],
    ids: torch.Tensor,
    scores: torch.Tensor,
    what: str = "logits_processor",
) -> torch.Tensor:
    """`scores` (`[1, vocab]`, not modified) after the processors of a request for `ids`.

    Each is handed tensors of its own, so that what it writes into them is seen by nobody. Raises
    OwnFailure, also where what comes back is no scores.
    """
    for processor in processors:
        act = partial(_one_row, processor, ids, scores)
        by_prefix = isinstance(processor, AllowedByPrefix)
        scores = fenced("prefix_allowed_tokens_fn" if by_prefix else what, request, act)
    return scores


def _one_row(
    processor: Callable[..., torch.Tensor], ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """What a processor makes of a row; anything that broadcasts would become a wrong text."""
    import torch

    found = processor(ids.clone(), scores.clone())
    wanted = f"it must return [1, {scores.shape[1]}] scores"
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{wanted}, not {type(found).__name__}")
    if found.shape != scores.shape:
        raise ValueError(f"{wanted}, not {list(found.shape)}")
    if not found.is_floating_point() or found.device != scores.device:
        raise ValueError(
            f"{wanted} of {scores.dtype} on {scores.device}, not of {found.dtype} on {found.device}"
        )
    found = found.to(scores.dtype, copy=True)
    if not bool((found < torch.inf).all()) and bool((scores < torch.inf).all()):
        raise ValueError("the scores that it returns are not numbers")
    return found


def met(request: int, criteria: Seq[Callable[..., object]], tokens: Seq[int]) -> bool:
    """Whether one of a request's criteria says that its tokens are complete. Raises OwnFailure."""
    return any(
        fenced("stopping_criteria", request, partial(_says, criterion, tokens))
        for criterion in criteria
    )


def _says(criterion: Callable[..., object], tokens: Seq[int]) -> bool:
    """What a criterion says of one row, whose scores it is not shown."""
    import torch

    return bool(criterion(torch.tensor([tokens]), None))

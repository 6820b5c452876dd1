"""A padded attention called by hand: its mask function, then its function, as a model would."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from jackfield.testing.attention.jobs import Job
from jackfield.testing.attention.rows import Asked
from jackfield.testing.attention.truth import Piece
from jackfield.testing.checks import WrongError
from jackfield.testing.watching import Snapshot

#: How query, keys and values lie: as new tensors, as models split heads, as a static cache cuts.
LYING = ("dense", "tokens first", "cut")


def laid(tensor: torch.Tensor, lying: str) -> torch.Tensor:
    """The same numbers, `[rows, heads, tokens, size]`, in memory as `lying` says."""
    if lying == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if lying == "cut":
        rows, heads, tokens, size = tensor.shape
        wider = tensor.new_full((rows, heads, tokens + 3, size), 100.0)
        wider[:, :, :tokens] = tensor
        return wider[:, :, :tokens]
    return tensor


def mask_of(job: Job, what: Asked) -> Any:
    """What the mask function makes of the step, called with the keywords of transformers."""
    rows, needs = what.rows, what.needs
    queries, keys = what.pieces[0].reached.shape
    offset: Any = torch.tensor(rows.past, device=job.device) if rows.on_device else rows.past
    static_decode = rows.unwritten > 0 and queries == 1
    arguments = {
        "batch_size": len(what.pieces),
        "q_length": queries,
        "kv_length": keys,
        "q_offset": offset,
        "kv_offset": what.kv_offset,
        "mask_function": what.mask_function,
        "attention_mask": what.attention_mask,
        "allow_is_causal_skip": what.plain and not static_decode,
        "dtype": job.dtype,
        "config": getattr(job.module, "config", None),
        "use_vmap": False,
        "device": torch.device(job.device),
    }
    if local := needs.window or needs.chunk:
        arguments["local_size"] = local
    lent = Snapshot(attention_mask=what.attention_mask, q_offset=offset)
    mask = job.bound.mask(**arguments)
    lent.check()
    return own_mask(what, job.dtype) if needs.own_mask else mask


def own_mask(what: Asked, dtype: torch.dtype) -> torch.Tensor:
    """A mask as models make it themselves: numbers that are added to the scores of each head."""
    masks = []
    for piece in what.pieces:
        assert piece.bias is not None
        masks.append(piece.bias.masked_fill(~piece.seen, torch.finfo(dtype).min))
    return torch.stack(masks)


def keywords(job: Job, what: Asked, declared: frozenset[str]) -> dict[str, Any]:
    """The keyword arguments of a layer's call."""
    first, needs = what.pieces[0], what.needs
    found: dict[str, Any] = {"dropout": 0.0, "scaling": needs.scaling}
    if "sliding_window" in declared:
        found["sliding_window"] = needs.window
    if "softcap" in declared:
        found["softcap"] = needs.softcap
    if "sinks" in declared:
        found["s_aux"] = first.sinks
    if needs.bias:
        found["position_bias"] = torch.stack([p.bias for p in what.pieces if p.bias is not None])
    return found


def prepared(job: Job, what: Asked) -> None:
    """Have the module say what the call says."""
    module: Any = job.module
    module.scaling = what.needs.scaling
    sinks = what.pieces[0].sinks
    if sinks is not None and hasattr(module, "sinks"):
        module.sinks.data = sinks.clone()


def called(
    job: Job, what: Asked, declared: frozenset[str], lying: str = "dense"
) -> list[torch.Tensor]:
    """The output of each row, `[queries, heads, value_dim]`.

    Raises WrongError where the call is not what the contract says: shape, dtype, device, what is
    changed.
    """
    prepared(job, what)
    with torch.inference_mode():
        mask = mask_of(job, what)
        query, key, value = stacked(what.pieces, lying)
        given = keywords(job, what, declared)
        lent = Snapshot(query=query, key=key, value=value, mask=mask,
                    sinks=given.get("s_aux"), position_bias=given.get("position_bias"))  # fmt: skip
        found = job.bound.forward(job.module, query, key, value, mask, **given)
        output = first_of(found)
        rows, heads, queries, _ = query.shape
        held_to_shape(output, (rows, queries, heads, value.shape[3]), query, "forward")
        if not output.is_contiguous():
            raise WrongError(
                f"the output of forward is not contiguous: its strides are {output.stride()}"
            )
        lent.check()
        lent.check_own(output)
        return list(output.unbind(0))


def stacked(
    pieces: Seq[Piece], lying: str = "dense"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (
        laid(torch.stack([getattr(piece, part) for piece in pieces]), lying)
        for part in ("query", "keys", "values")
    )
    return query, key, value


def first_of(found: Any) -> torch.Tensor:
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise WrongError(f"forward must return (output, weights), got {type(found).__name__}")
    return found[0]  # type: ignore[no-any-return]


def held_to_shape(output: Any, shape: tuple[int, ...], query: torch.Tensor, what: str) -> None:
    """Raise WrongError unless `output` has this shape, and dtype and device of `query`."""
    if not isinstance(output, torch.Tensor):
        raise WrongError(f"{what} must return a tensor, got {type(output).__name__}")
    if tuple(output.shape) != shape:
        turned = sorted(output.shape) == sorted(shape)
        hint = "; it is not transposed" if turned else ""
        raise WrongError(
            f"{what} returns the shape {list(output.shape)}, and {list(shape)} is due{hint}"
        )
    if output.dtype != query.dtype or output.device != query.device:
        raise WrongError(
            f"{what} returns {output.dtype} on {output.device}, and {query.dtype} on "
            f"{query.device} is due"
        )

"""Positions for decoders that take none: they number tokens by the columns that a cache has."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PAST = "past_key_values_length"
_POSITIONS = "position_ids"


class Numbering:
    """Has the decoder of `model` number the tokens of a step by their positions.

    BART's and many others have a module for positions that is told how many columns there are
    before the step. In rows that are padded at the left that is wrong, and no argument of the model
    says otherwise. So the module is asked for rows of the same positions at a time, as it would be
    for each alone: what it makes of token ids (M2M's gives padding none) stays its own affair.
    Nothing in the model is changed but during `by`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.get_decoder().modules())
        kinds = {type(module) for module in modules}
        counting = {k for k in kinds if _PAST in inspect.signature(k.forward).parameters}
        self._modules = [module for module in modules if type(module) in counting]

    @contextlib.contextmanager
    def by(self, positions: torch.Tensor) -> Iterator[None]:
        """Calls of the model meanwhile are a step with these `positions`, `[rows, width]`.

        A row's tokens are its last ones, in a run; what is before them is padding.
        """
        groups = _alike(positions) if self._modules else []
        before = [(module, vars(module).get("forward")) for module in self._modules]
        for module in self._modules:
            module.forward = _asking(module.forward, groups, positions.shape)
        try:
            yield
        finally:
            for module, forward in before:  # accelerate has its own there
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward


class _Alike(NamedTuple):
    """Neighbours whose tokens have the same positions: `tokens` of them from `start` on."""

    rows: slice
    start: int
    tokens: int


def _alike(positions: torch.Tensor) -> list[_Alike]:
    found: list[_Alike] = []
    for row, own in enumerate(positions.tolist()):
        count = 1
        while count < len(own) and own[-count] and own[-count - 1] == own[-count] - 1:
            count += 1
        if found and found[-1][1:] == (own[-count], count):
            found[-1] = found[-1]._replace(rows=slice(found[-1].rows.start, row + 1))
        else:
            found.append(_Alike(slice(row, row + 1), own[-count], count))
    return found


def _asking(
    forward: Callable[..., torch.Tensor], groups: Sequence[_Alike], shape: torch.Size
) -> Callable[..., torch.Tensor]:
    """`forward` of a module for positions, asked for each of `groups`."""
    signature, (rows, width) = inspect.signature(forward), shape

    def asked(*args: Any, **kwargs: Any) -> torch.Tensor:
        given, found = signature.bind(*args, **kwargs).arguments, None
        for group in groups:
            own = {name: _part(value, shape, group) for name, value in given.items()}
            if isinstance(columns := given.get(_POSITIONS), torch.Tensor):
                by = group.start - given.get(_PAST, 0)
                own[_POSITIONS] = _shifted(columns, width, group.tokens, by)
            own[_PAST] = group.start
            part = forward(**own)
            if found is None:
                found = part.new_zeros(rows, width, part.shape[-1])
            found[group.rows, width - group.tokens :] = part
        assert found is not None
        return found

    return asked


def _shifted(columns: torch.Tensor, width: int, count: int, by: int) -> torch.Tensor:
    """The positions of the last `count` tokens of a row, of those of `width` columns.

    Most have them as `[width]` or `[1, width]`, Pegasus-X as `[width, 1]`.
    """
    along = next(dim for dim, size in enumerate(columns.shape) if size == width)
    gap = width - count
    return columns.narrow(along, gap, count) - gap + by


def _part(value: Any, shape: torch.Size, group: _Alike) -> Any:
    """What an argument is for the rows of a group, and their last tokens."""
    if isinstance(value, torch.Tensor) and value.shape[:2] == shape:
        return value[group.rows, shape[1] - group.tokens :]
    if isinstance(value, tuple) and tuple(value[:2]) == shape:  # a torch.Size, too
        rows = group.rows.stop - group.rows.start
        return torch.Size((rows, group.tokens, *value[2:]))
    return value

"""A model's part of a step: hands a cache its keys and values, and reads what a query would."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from jackfield.errors import PluginError
from jackfield.testing.cache.judging import Judge, Text
from jackfield.testing.checks import WrongError

if TYPE_CHECKING:
    from jackfield.contracts import ModelInputs, PackedKVCache, PackedLayer, ScheduledSequence

Items = Seq[tuple["ScheduledSequence", Text]]


def strided(states: torch.Tensor, heads: int) -> torch.Tensor:
    """A copy with the same numbers whose dimension `heads` lies outermost, as models make them."""
    return states.transpose(0, heads).contiguous().transpose(0, heads)


def packed_step(
    cache: PackedKVCache,
    items: Items,
    judge: Judge,
    windows: Seq[int | None],
    layers: Seq[int],
    rows: int = 0,
) -> None:
    """Write the step in `layers`, and read all that its queries see.

    `rows`: those of a fixed place, whose padding is written as well.
    """
    for layer in layers:
        numbers = [
            number
            for item, text in items
            for number in text.chain[item.start : item.start + len(item.token_ids)]
        ]
        keys, values = (
            strided(_filled(states, rows), 1) for states in judge.states.several(numbers, layer)
        )
        before = keys.clone(), values.clone()
        try:
            found = cache.write(layer, keys, values)
        except PluginError:  # which sees that something is wrong; here we may see what
            _read_again(cache, layer, before, items, judge, windows)
            raise
        if not (torch.equal(keys, before[0]) and torch.equal(values, before[1])):
            raise WrongError(f"write changed the keys or values of layer {layer} that it was given")
        keys.fill_(float("nan"))  # a model uses this memory again
        values.fill_(float("nan"))
        read_pages(found, layer, items, judge, windows)


def _filled(states: torch.Tensor, rows: int) -> torch.Tensor:
    """With large numbers behind them, up to so many rows."""
    more = states.new_full((max(0, rows - len(states)), *states.shape[1:]), 999.0)
    return torch.cat([states, more])


def _read_again(
    cache: Any, layer: int, states: Any, items: Items, judge: Judge, windows: Seq[int | None]
) -> None:
    """Raises WrongError where what can be read says more than the error that is at hand."""
    try:
        found = cache.inner.write(layer, *states)
        read_pages(found, layer, items, judge, windows)
    except WrongError:
        raise
    except Exception:  # noqa: BLE001 - broken already
        return


def read_pages(
    found: PackedLayer, layer: int, items: Items, judge: Judge, windows: Seq[int | None]
) -> None:
    """All that the queries of a step see in one layer: by tables on the device, and by `gather`."""
    tables, window = found.tables, windows[layer]
    for row, (item, text) in enumerate(items):
        end = item.start + len(item.token_ids)
        oldest = 0 if window is None else max(0, item.start + 1 - window)
        first, size = int(tables.first[row]), tables.page_size
        places = [(p - first, p) for p in range(oldest, end)]
        if oldest < first or (places[-1][0] // size) >= tables.block_table.shape[1]:
            raise WrongError(
                f"the pages of layer {layer} have tokens {first} to "
                f"{first + tables.block_table.shape[1] * size - 1} of request {text.request}, and "
                f"its queries see {oldest} to {end - 1}"
            )
        slots = [int(tables.block_table[row, at // size]) * size + at % size for at, _ in places]
        positions = [p for _, p in places]
        for what, pool in enumerate((found.keys, found.values)):
            flat = pool.flatten(0, 1)
            if max(slots) >= len(flat):
                raise WrongError(
                    f"page {max(slots) // size} of request {text.request}, of {len(pool)} in "
                    f"layer {layer}"
                )
            judge.look(flat[slots], what, layer, text, positions)
        if not tables.runs:  # at a fixed place, where nobody goes sequence by sequence
            continue
        gathered = found.gather(row)
        seen = list(range(tables.oldest(row), end))
        for what, states in enumerate(gathered):
            judge.look(states.transpose(0, 1), what, layer, text, seen)


def padded_step(
    inputs: ModelInputs, items: Items, judge: Judge, types: Seq[str], windows: Seq[int | None]
) -> list[tuple[int, ...]]:
    """The same with rows × columns. Returns where each layer's keys lie: address and shape."""
    kwargs = inputs.kwargs
    past, width = kwargs["past_key_values"], kwargs["input_ids"].shape[1]
    rows = list(range(inputs.rows)) if inputs.row_of is None else inputs.row_of.tolist()
    columns = [
        _columns(kwargs.get("attention_mask"), row, item)
        for row, (item, _) in zip(rows, items, strict=True)
    ]
    where = []
    for layer, (kind, window) in enumerate(zip(types, windows, strict=True)):
        length, offset = past.get_mask_sizes(width, layer)
        given = _given(judge, items, rows, (inputs.rows, width), layer)
        before = [states.clone() for states in given]
        found = past.update(*given, layer)
        if not all(map(torch.equal, given, before)):
            raise WrongError(
                f"update changed the keys or values of layer {layer} that it was given"
            )
        if found[0].shape[2] != length:
            raise WrongError(
                f"update of layer {layer} returns {found[0].shape[2]} columns, and "
                f"get_mask_sizes said {length}: masks are made for these"
            )
        for row, (item, text), own in zip(rows, items, columns, strict=True):
            if not item.token_ids:
                continue
            oldest = _oldest(item.start, kind, window)
            seen = range(oldest, item.start + len(item.token_ids))
            at = [own[p] - int(offset) for p in seen]
            if at[0] < 0 or at[-1] >= length:
                raise WrongError(
                    f"layer {layer} has columns {int(offset)} to {int(offset) + length - 1}, and "
                    f"the queries of request {text.request} see {own[oldest]} to {own[seen[-1]]}"
                )
            for what, states in enumerate(found):
                judge.look(states[row][:, at].transpose(0, 1), what, layer, text, list(seen))
        where.append((found[0].data_ptr(), found[1].data_ptr(), *found[0].shape))
    return where


def _oldest(start: int, kind: str, window: int | None) -> int:
    """The first token that the query at `start` sees."""
    if window is None:
        return 0
    return start // window * window if kind == "chunked_attention" else max(0, start + 1 - window)


def _columns(mask: torch.Tensor | None, row: int, item: ScheduledSequence) -> list[int]:
    """In which columns a row's tokens lie, those of the step included."""
    end = item.start + len(item.token_ids)
    if mask is None:
        return list(range(end))
    found: list[int] = mask[row].nonzero().flatten().tolist()
    if len(found) != end:
        raise WrongError(
            f"attention_mask has {len(found)} valid columns for request {item.sequence.id}, which "
            f"has {end} tokens with those of the step"
        )
    return found


def _given(
    judge: Judge, items: Items, rows: Seq[int], size: tuple[int, int], layer: int
) -> list[torch.Tensor]:
    """Keys and values `[rows, heads, width, head_dim]`; those of padding are large."""
    found = []
    for what, shape in enumerate(judge.states.shapes[layer]):
        states = judge.states.full((*size, *shape), 999.0)
        for row, (item, text) in zip(rows, items, strict=True):
            if count := len(item.token_ids):
                numbers = text.chain[item.start : item.start + count]
                states[row, -count:] = judge.states.several(numbers, layer)[what]
        found.append(states.transpose(1, 2))
    return found

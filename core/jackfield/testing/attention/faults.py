"""Which usual mistake an output shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from jackfield.testing.attention import blocks, cuts
from jackfield.testing.attention.truth import Piece, attend, mixed, scores_of

Call = Callable[[Seq[Piece]], Seq[torch.Tensor]]
Mistake = Callable[[Piece], "torch.Tensor | Piece | None"]

NEAR = 0.3  # of the distance from the right output: a mistake that explains it is nearer
TOLD = 4  # mistakes that explain an output alike


def _changed(**change: Callable[[Piece], torch.Tensor]) -> Mistake:
    def changed(piece: Piece) -> Piece:
        made: dict[str, Any] = {name: make(piece) for name, make in change.items()}
        return replace(piece, **made)

    return changed


def _all(piece: Piece) -> torch.Tensor:
    return torch.ones_like(piece.reached)


def _last(piece: Piece) -> torch.Tensor:
    """Keys that are not the last column."""
    keys = piece.inside.shape[1]
    return piece.inside & (_positions(piece)[1] < keys - 1)


def _positions(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    count, keys = piece.reached.shape
    key = torch.arange(max(keys, piece.at + count), device=piece.reached.device)
    return key[piece.at : piece.at + count, None], key[:keys]


def _windowed(by: int) -> Mistake:
    def changed(piece: Piece) -> Piece | None:
        if piece.window is None:
            return None
        query, key = _positions(piece)
        return replace(piece, inside=key > query - piece.window - by)

    return changed


def _one_too_short(piece: Piece) -> torch.Tensor | None:
    """Of a window of one key nothing is left: the smallest number everywhere mixes all values."""
    short = _windowed(-1)(piece)
    if not isinstance(short, Piece):
        return None
    made, values = attend(short), piece.values.double().mean(1)
    return torch.where(
        made.isnan(), values.repeat_interleave(made.shape[1] // len(values), 0), made
    )


def _last_columns(piece: Piece) -> torch.Tensor | None:
    if piece.window is None:
        return None
    _, key = _positions(piece)
    inside = piece.inside & (key >= len(key) - piece.window)
    return attend(replace(piece, inside=inside)).nan_to_num(0.0)


def _not_itself(piece: Piece) -> torch.Tensor:
    query, key = _positions(piece)
    return piece.reached & (key != query)


def _first(piece: Piece) -> torch.Tensor:
    """Keys but the first that is seen by anybody."""
    seen = piece.seen.any(0)
    first = int(seen.int().argmax())
    return piece.inside & (_positions(piece)[1] != first)


def _top_left(piece: Piece) -> torch.Tensor:
    query, key = _positions(piece)
    return key <= query - piece.at


def _one_later(piece: Piece) -> torch.Tensor:
    query, key = _positions(piece)
    return key <= query + 1


def _in_blocks(change: Callable[[Piece], Piece]) -> Mistake:
    return lambda piece: change(piece) if piece.blocks else None


def _only_back(piece: Piece) -> Piece:
    query, key = _positions(piece)
    return replace(piece, reached=key <= query)


def _of_one_block(piece: Piece) -> torch.Tensor:
    """bool `[queries, keys]`: query and key are of one block."""
    query, key = _positions(piece)
    found = torch.zeros_like(piece.reached)
    for begin, end in piece.blocks:
        found |= (query >= begin) & (query < end) & (key >= begin) & (key < end)
    return found


def _all_of_a_block(piece: Piece) -> Piece:
    return replace(piece, inside=piece.inside | _of_one_block(piece))


def _on_to_the_end(piece: Piece) -> Piece:
    return replace(piece, reached=piece.reached | _of_one_block(piece).any(1, keepdim=True))


def _other_scaling(of: Callable[[Piece], float]) -> Mistake:
    return lambda piece: replace(piece, scaling=of(piece))


def _own_scaling(piece: Piece) -> float:
    return float(piece.query.shape[2] ** -0.5)


def _capped(change: Callable[[Piece, torch.Tensor, float], torch.Tensor]) -> Mistake:
    """Scores that are capped in another way; `change` is given them without a cap."""

    def changed(piece: Piece) -> torch.Tensor | None:
        if piece.softcap is None:
            return None
        scores = change(piece, scores_of(replace(piece, softcap=None)), piece.softcap)
        return mixed(piece, scores.masked_fill(~piece.seen, float("-inf")))

    return changed


def _sunk(change: Callable[[Piece, torch.Tensor], torch.Tensor]) -> Mistake:
    """An output without sinks, changed."""

    def changed(piece: Piece) -> torch.Tensor | None:
        if piece.sinks is None:
            return None
        return change(piece, attend(replace(piece, sinks=None)))

    return changed


def _biased(change: Callable[[Piece, torch.Tensor], torch.Tensor | None]) -> Mistake:
    def changed(piece: Piece) -> Piece | None:
        if piece.bias is None:
            return None
        return replace(piece, bias=change(piece, piece.bias))

    return changed


def _in_turn(piece: Piece) -> Piece | None:
    """Query heads that take the key heads in turn, where they share them in groups."""
    groups = piece.query.shape[0] // piece.keys.shape[0]
    if groups == 1 or piece.keys.shape[0] == 1:
        return None
    return replace(piece, keys=piece.keys.repeat(groups, 1, 1),
                   values=piece.values.repeat(groups, 1, 1))  # fmt: skip


def _first_key_head(piece: Piece) -> Piece | None:
    if piece.keys.shape[0] == 1:
        return None
    return replace(piece, keys=piece.keys[:1], values=piece.values[:1])


def _swapped(piece: Piece) -> Piece | None:
    if piece.keys.shape != piece.values.shape:
        return None
    return replace(piece, keys=piece.values, values=piece.keys)


def _untransposed(piece: Piece) -> torch.Tensor:
    right = attend(piece)
    return right.transpose(0, 1).reshape(right.shape)


def _unweighted(piece: Piece) -> torch.Tensor:
    """Scores that never went through a softmax."""
    scores = scores_of(piece).masked_fill(~piece.seen, 0.0)
    values = piece.values.double()
    values = values.repeat_interleave(scores.shape[0] // values.shape[0], 0)
    return (scores @ values).transpose(0, 1)


def _exponentials(piece: Piece) -> torch.Tensor:
    """Exponentials that were not divided by their sum."""
    scores = scores_of(piece).masked_fill(~piece.seen, float("-inf"))
    values = piece.values.double()
    values = values.repeat_interleave(scores.shape[0] // values.shape[0], 0)
    return ((scores - scores.amax(2, keepdim=True)).exp() @ values).transpose(0, 1)


#: What is wrong -> what would come out; None where the mistake cannot show. Of two that may come to
#: the same, the narrower one is first.
MISTAKES: tuple[tuple[str, Mistake], ...] = (
    ("the scores are not scaled", _other_scaling(lambda _: 1.0)),
    ("the scores are scaled by head_dim ** -0.5 and not by `scaling`",
     _other_scaling(_own_scaling)),
    ("the scores are scaled twice", _other_scaling(lambda p: p.scaling**2)),
    ("the scores are scaled by `scaling` and by head_dim ** -0.5 too",
     _other_scaling(lambda p: p.scaling * _own_scaling(p))),
    ("the scores are divided by `scaling`", _other_scaling(lambda p: 1 / p.scaling)),
    ("the window is one key too long", _windowed(1)),
    ("the window is one key too short", _one_too_short),
    *cuts.MISTAKES,
    ("queries see one later key", _changed(reached=_one_later)),
    ("queries see later keys", _changed(reached=_all)),
    ("padding is seen", _changed(valid=lambda p: p.valid | True)),
    ("the window is ignored", _changed(inside=_all)),
    ("nothing is masked", _changed(reached=_all, inside=_all, valid=lambda p: p.valid | True)),
    ("the last key is dropped", _changed(inside=_last)),
    ("queries do not see their own key", _changed(reached=_not_itself)),
    ("the first key is dropped", _changed(inside=_first)),
    ("causality counts from the first key: queries are taken for the first tokens, not the last",
     _changed(reached=_top_left)),
    ("queries do not see on to the end of their block", _in_blocks(_only_back)),
    ("queries see all of their block, also what is before their window",
     _in_blocks(_all_of_a_block)),
    ("queries of a block see on to the last key", _in_blocks(_on_to_the_end)),
    ("the softcap is ignored", lambda p: replace(p, softcap=None) if p.softcap else None),
    ("the softcap is applied to scores before they are scaled",
     _capped(lambda p, s, cap: cap * torch.tanh(s / p.scaling / cap) * p.scaling)),
    ("the softcap squashes scores and does not multiply them with the cap again",
     _capped(lambda p, s, cap: torch.tanh(s / cap))),
    ("the softcap multiplies and does not divide before",
     _capped(lambda p, s, cap: cap * torch.tanh(s))),
    ("scores are clamped at the softcap",
     _capped(lambda p, s, cap: s.clamp(-cap, cap))),
    ("the sinks are ignored", _sunk(lambda p, out: out)),
    ("a sink of 0 takes part instead of the learned ones",
     lambda p: None if p.sinks is None else replace(p, sinks=torch.zeros_like(p.sinks))),
    ("the sinks are scaled",
     lambda p: None if p.sinks is None else replace(p, sinks=p.sinks * p.scaling)),
    ("the sinks are added to the scores",
     lambda p: None if p.sinks is None else mixed(
         replace(p, sinks=None),
         (scores_of(p) + p.sinks.double()[:, None, None]).masked_fill(~p.seen, float("-inf")))),
    ("the sinks are those of the heads in reverse",
     lambda p: None if p.sinks is None else replace(p, sinks=p.sinks.flip(0))),
    ("the position bias is ignored", _biased(lambda p, bias: None)),
    ("the position bias is scaled", _biased(lambda p, bias: bias * p.scaling)),
    ("the position bias is subtracted", _biased(lambda p, bias: -bias)),
    ("the position bias of head 0 is that of all heads",
     _biased(lambda p, bias: bias[:1].expand_as(bias))),
    (("query heads share key heads in turn, where they share them in groups "
     "(repeat, where it should be repeat_interleave)"), _in_turn),
    ("all query heads read key head 0", _first_key_head),
    ("keys and values are exchanged", _swapped),
    ("the output is not transposed: heads and queries are exchanged in it", _untransposed),
    ("the window is taken for the last columns, also where these are not the latest keys",
     _last_columns),
    ("the output is all 0", lambda p: torch.zeros_like(attend(p))),
    ("there is no softmax", _unweighted),
    ("the weights do not add up to 1", _exponentials),
    ("the output is in reverse order", lambda p: attend(p).flip(0)),
    ("the heads are in reverse order", lambda p: attend(p).flip(1)),
    *blocks.MISTAKES,
)  # fmt: skip


def named(pieces: Seq[Piece], found: Seq[torch.Tensor], off: float, bound: float) -> str | None:
    """The usual mistake that gives the output `found`, which is `off` at most; None: none does.

    Several, where they come to the same in a step of few keys.
    """
    near = max(NEAR * off, 10 * bound)
    explain = [(away, what) for away, what in _explaining(pieces, found) if away < near]
    best = min((away for away, _ in explain), default=near)
    alike = [what for away, what in explain if away <= max(best, bound)]
    told = ", or ".join(alike[:TOLD])
    return told or _exchanged(pieces, found, off) or _foreign(pieces, found, off)


def _explaining(pieces: Seq[Piece], found: Seq[torch.Tensor]) -> Iterator[tuple[float, str]]:
    """How far the output is from what each mistake makes."""
    for what, mistake in MISTAKES:
        made = [mistake(piece) for piece in pieces]
        if all(one is not None for one in made):
            yield _unlike(pieces, found, made), what  # type: ignore[arg-type]


def _unlike(pieces: Seq[Piece], found: Seq[torch.Tensor], made: Seq[torch.Tensor | Piece]) -> float:
    """The distance from what a mistake makes.

    One that moves outputs moves those of queries that see nothing too: they may be anything.
    """
    outputs = []
    for own, one in zip(found, made, strict=True):
        if isinstance(one, Piece):
            outputs.append(attend(one))
        else:
            outputs.append(torch.where(one.isnan(), own.double(), one.double()))
    return distance(pieces, found, outputs)


def _foreign(pieces: Seq[Piece], found: Seq[torch.Tensor], off: float) -> str | None:
    """Whether a row has its own queries and the keys of another one."""
    for row, (piece, own) in enumerate(zip(pieces, found, strict=True)):
        for number, other in enumerate(pieces):
            if number == row or other.keys.shape != piece.keys.shape:
                continue
            mixed_up = replace(piece, keys=other.keys, values=other.values)
            if distance([piece], [own], [attend(piece)]) < NEAR * off:
                continue  # right
            if distance([piece], [own], [attend(mixed_up)]) < NEAR * off / 10:
                return f"sequence {row} reads the keys and values of sequence {number}"
    return None


def _exchanged(pieces: Seq[Piece], found: Seq[torch.Tensor], off: float) -> str | None:
    """Whether a row is what another one should be."""
    truth = [attend(piece) for piece in pieces]
    for row, own in enumerate(found):
        for other, right in enumerate(truth):
            if other == row or own.shape != right.shape:
                continue
            asked = pieces[row].asked & pieces[other].asked
            away = (own.double() - right)[asked].abs()
            if away.numel() and float(away.max()) < NEAR * off / 10:
                return f"sequence {row} has the output of sequence {other}"
    return None


def distance(pieces: Seq[Piece], found: Seq[torch.Tensor], expected: Seq[torch.Tensor]) -> float:
    """The largest difference over queries that see anything; inf where a number is none."""
    worst = 0.0
    for piece, own, right in zip(pieces, found, expected, strict=True):
        away = (own.double() - right.double())[piece.asked].abs()
        if away.numel():
            largest = float(away.max())
            worst = max(worst, largest if largest == largest else float("inf"))
    return worst


def misseen(pieces: Seq[Piece], call: Call) -> str | None:
    """The first key that a query sees and must not, or the other way round; None: there is none.

    Found out by changing the values of one key at a time: what an output depends on is seen.
    """
    before = call(pieces)
    width = max(piece.values.shape[1] for piece in pieces)
    stride = 1 + width // 256  # of long texts some, and then those before it
    for column in (*range(0, width, stride), width - 1):
        if told := _misseen(pieces, call, before, column):
            for earlier in range(max(0, column - stride + 1), column):
                if first := _misseen(pieces, call, before, earlier):
                    return first
            return told
    return None


def _misseen(pieces: Seq[Piece], call: Call, before: Seq[torch.Tensor], column: int) -> str | None:
    """The same of one key."""
    after = call([_poked(piece, column) for piece in pieces])
    for row, (piece, old, new) in enumerate(zip(pieces, before, after, strict=True)):
        if column >= piece.values.shape[1]:
            continue
        depends = ((new - old).abs().amax((1, 2)) > 1e-9) | new.isnan().flatten(1).any(1)
        for query in (depends != piece.seen[:, column]).nonzero().flatten().tolist():
            if piece.asked[query]:
                return _told(piece, row, query, column, sees=bool(depends[query]))
    return None


def _poked(piece: Piece, column: int) -> Piece:
    if column >= piece.values.shape[1]:
        return piece
    values = piece.values.clone()
    values[:, column] += 64.0
    return replace(piece, values=values)


def _told(piece: Piece, row: int, query: int, key: int, *, sees: bool) -> str:
    who = f"query {piece.at + query} of sequence {row}"
    if not sees:
        return f"{who} does not see key {key}"
    why = "padding"
    if piece.valid[key]:
        why = "outside of its window" if piece.reached[query, key] else "later"
    return f"{who} sees key {key}, which is {why}"


def problems(
    pieces: Seq[Piece], found: Seq[torch.Tensor], truth: Seq[torch.Tensor], bound: float
) -> Iterator[str]:
    """Where an output is off, in words."""
    for row, (piece, own, right) in enumerate(zip(pieces, found, truth, strict=True)):
        away = (own.double() - right).abs().amax(2)
        bad = (~(away.amax(1) <= bound)) & piece.asked
        if bad.any():
            query = int(bad.int().argmax())
            value = float(away[query].max())
            what = "is NaN" if value != value else f"is off by {value:.3g}"
            yield (
                f"the output of query {piece.at + query} of sequence {row} {what}"
                f"{_of_heads(~(away[query] <= bound))} (at most {bound:.2g} is rounding)"
            )


def _of_heads(bad: torch.Tensor) -> str:
    """Which heads are off, where not all of them are."""
    off = bad.nonzero().flatten().tolist()
    if 2 * len(off) > len(bad):
        return ""
    if len(off) > 1 and off == list(range(off[0], off[-1] + 1)):
        return f" in heads {off[0]} to {off[-1]} alone, of {len(bad)}"
    more = ", …" if len(off) > 8 else ""
    numbers = ", ".join(map(str, off[:8])) + more
    return f" in head{'s' * (len(off) > 1)} {numbers} alone, of {len(bad)}"

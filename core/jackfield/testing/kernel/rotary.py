"""Checks of rotations: direct calls, held to the function that the layer itself calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from jackfield.bridge.rotary import CALLS_NONE, TURNS_NO_PAIR, heads_of, own_pair
from jackfield.contracts import rotary_of
from jackfield.errors import error_text
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.kernel.layers import capabilities_of, placed
from jackfield.testing.kernel.turned import held, pair_of
from jackfield.testing.kernel.turning import (
    ANGLES,
    EXTREME,
    HEADS,
    PARTS,
    STRIDED,
    TEXTS,
    TOKENS,
    WIDER,
    Heads,
    Turn,
    Turning,
    like_of,
    sizes_of,
    turnings,
)
from jackfield.testing.subject import Subject

_LEAVE = "leave calls that say more to the layer's own function, which `rotary_of` finds"
WHOLE = 4  # classes of layers of which all is checked; of others a few texts


class _Turns:
    """Rotates inputs by a layer's function and by the kernel's."""

    def __init__(self, subject: Subject, title: str, model: str, **how: Any) -> None:
        self._subject, self._which, self._how = subject, (title, model), how
        self._found: Turning | None = None

    def __call__(self, turn: Turn) -> str:
        if self._found is None:
            self._found = turnings(self._subject, *self._which, **self._how)[0]
        worst = held(self._found, turn.made(self._found, self._subject.seed))
        return f"at most {worst:.0%} of what rounding may be"


def checks(subject: Subject, found: Mapping[str, str]) -> Iterator[Check]:
    """For each class of layers whose rotation it replaces."""
    for number, (title, model) in enumerate(found.items()):
        if told := _no_rotation(subject, title, model):
            yield Check(f"{title}.function", f"{title}: its own function", partial(_wrong, told))
            continue
        calls = partial(_Turns, subject, title, model)
        few = number >= WHOLE
        yield Check(f"{title}.tokens", f"{title}: tokens", calls(), cases=TOKENS[: 2 if few else 4])
        yield Check(f"{title}.texts", f"{title}: texts", calls(), cases=TEXTS[: 2 if few else 4])
        if _takes_parts(subject, title, model):
            yield Check(f"{title}.part", f"{title}: a part of a head", calls(), cases=PARTS)
        if not few:
            yield from _of_a_class(subject, title, model)
            continue
        for dtype in sorted(capabilities_of(subject).dtypes & {"bfloat16"}):
            own, what = calls(dtype=dtype), f"dtypes: {dtype}, {title}"
            yield Check(f"{title}.dtype.{dtype}", what, own, cases=WIDER)


def _no_rotation(subject: Subject, title: str, model: str) -> str:
    """Why there is nothing in such a layer that a FusedRotary can replace; empty where there is."""
    try:
        own = _own(subject, title, model)
    except NotTriedError:  # its checks tell why
        return ""
    if own is None:
        return f"it fits {title}, {CALLS_NONE}"
    pair = own_pair(own.own, Turn(2, 3).made(own, 0))
    return f"it fits {title}, {TURNS_NO_PAIR}" if pair is None else ""


def _wrong(told: str, _: object) -> None:
    raise WrongError(told)


def _takes_parts(subject: Subject, title: str, model: str) -> bool:
    """Whether the layer's own function also turns a part of a head."""
    try:
        own = _own(subject, title, model)
    except NotTriedError:
        return False
    return own is not None and own_pair(own.own, Turn(1, 1, part=True).made(own, 0)) is not None


def _own(subject: Subject, title: str, model: str) -> Turning | None:
    """How such a layer itself rotates, in its own place; None: it calls nothing that does."""
    context, modules = placed(subject, title, model, **sizes_of(model))
    if not modules:
        raise NotTriedError("it does not fit such layers")
    own = rotary_of(modules[0])
    return None if own is None else Turning(modules[0], own, own, like_of(context))


def _of_a_class(subject: Subject, title: str, model: str) -> Iterator[Check]:
    can = capabilities_of(subject)
    calls = partial(_Turns, subject, title, model)
    many = (TOKENS[-1], TEXTS[-1])
    yield Check(f"{title}.many", f"{title}: many tokens", calls(), cases=many, large=True)
    yield Check(f"{title}.strided", f"{title}: strided inputs", calls(), cases=STRIDED)
    yield Check(f"{title}.angles", f"{title}: angles", calls(), cases=ANGLES)
    yield Check(
        f"{title}.heads", f"{title}: any heads", partial(_heads, subject, title, model), HEADS
    )
    for dtype in sorted(can.dtypes):
        cases = (*TOKENS[:3], *EXTREME, *WIDER)
        own = calls(dtype=dtype)
        yield Check(f"{title}.dtype.{dtype}", f"dtypes: {dtype}, {title}", own, cases=cases)

    def every(run: Any, **how: Any) -> Any:
        return lambda _: run(turnings(subject, title, model, **how), subject.seed)

    yield Check(f"{title}.more", f"{title}: other arguments", every(_more))
    yield Check(f"{title}.repeated", f"{title}: calls one after the other", every(repeated))
    for dtype in sorted(can.dtypes) if can.batch_invariant else ():
        what = f"batch_invariant, {dtype}, {title}"
        run = every(together, dtype=dtype)
        yield Check(f"{title}.batch_invariant.{dtype}", what, run)


def _heads(subject: Subject, title: str, model: str, heads: Heads) -> None:
    config: dict[str, Any] = {
        "num_attention_heads": heads.queries, "num_key_value_heads": heads.keys,
        "head_dim": heads.size, "hidden_size": heads.queries * heads.size,
    }  # fmt: skip
    try:
        found = turnings(subject, title, model, **config)[0]
    except (AttributeError, TypeError, ValueError) as error:
        raise NotTriedError(f"the kit's model cannot have such heads: {error}") from None
    if heads_of(found.module) != heads:
        raise NotTriedError("the kit's model keeps its own heads")
    for turn in (Turn(1, 1), Turn(2, 5)):
        held(found, turn.made(found, subject.seed))


def _more(found: list[Turning], seed: int) -> None:
    """What layers give beside the four: where heads are, by position and by name."""
    turning = found[0]
    q, k, cos, sin = Turn(2, 3).made(turning, seed)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    try:
        due = turning.own(q, k, cos, sin, unsqueeze_dim=2)
    except TypeError:
        raise NotTriedError("the layer's own function takes nothing else") from None
    for more, named in (((2,), {}), ((), {"unsqueeze_dim": 2})):
        how = f"a further argument, {'unsqueeze_dim=' if named else ''}2 (tokens before heads)"
        try:
            with torch.inference_mode():
                new = pair_of(turning.made(q, k, cos, sin, *more, **named))
            right = all(map(torch.allclose, new, due))
        except Exception as error:  # noqa: BLE001 - of whoever wrote it
            raise WrongError(f"with {how}, it raises {error_text(error)}; {_LEAVE}") from None
        if not right:
            raise WrongError(f"with {how}, it rotates as if there were none; {_LEAVE}")


def repeated(found: list[Turning], seed: int) -> None:
    """Layers in turn, inputs of several sizes; outputs stay as they were."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for call in range(12):
        turning = found[call % len(found)]
        shape = ((1, 2), (1, 2), (1, 65), (1, 1), (2, 3), (1, 1))[call % 6]
        given = Turn(*shape).made(turning, seed + call)
        try:
            held(turning, given)
        except WrongError as error:
            raise WrongError(f"in call {call}: {error}") from None
        with torch.inference_mode():
            kept += [(one, one.clone()) for one in pair_of(turning.made(*given))]
    if not all(torch.equal(one, before) for one, before in kept):
        raise WrongError("the output of a call changes in a later call: it is memory used again")


@torch.inference_mode()
def together(found: list[Turning], seed: int) -> None:
    """Tokens by themselves have the bits that they have among others."""
    turning = found[0]
    q, k, cos, sin = Turn(1, 80).made(turning, seed)
    due = pair_of(turning.made(q, k, cos, sin))
    for count in (1, 2, 17, 65):
        for begin in (0, 5, 80 - count):
            part = slice(begin, begin + count)
            new = pair_of(turning.made(q[:, :, part], k[:, :, part], cos[:, part], sin[:, part]))
            if not all(torch.equal(n, d[:, :, part]) for n, d in zip(new, due, strict=True)):
                raise WrongError(
                    f"{count} tokens by themselves have other bits than among 80, and "
                    "batch_invariant is declared"
                )

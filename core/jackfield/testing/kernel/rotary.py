"""Checks of rotations: direct calls, held to the function that the layer itself calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from jackfield.bridge.rotary import heads_of
from jackfield.contracts import FusedRotary, rotary_of
from jackfield.contracts.kernels import ROTARY
from jackfield.errors import error_text
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.kernel.layers import capabilities_of, functions, placed
from jackfield.testing.models import arguments_of
from jackfield.testing.subject import Subject
from jackfield.testing.watching import Snapshot

_LEAVE = "leave calls that say more to the layer's own function, which `rotary_of` finds"
WHOLE = 4  # classes of layers of which all is checked; of others a few texts
LAYERS = 2  # what is done with each is done with the functions of so many

Rotation = Callable[..., Any]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Turning:
    """How a layer rotates, and what the kernel puts in the place of that.

    `like` has the dtype and the device of what is rotated.
    """

    module: nn.Module
    own: Rotation
    made: Rotation
    like: torch.Tensor


def rotates(subject: Subject, title: str, model: str) -> bool:
    """Whether what it puts in the place of something is a rotation."""
    try:
        context, _ = placed(subject, title, model)
    except NotTriedError:
        return False
    return isinstance(subject.registered.bind(context), FusedRotary)


def turnings(
    subject: Subject, title: str, name: str, dtype: str = "", **config: Any
) -> list[Turning]:
    """Of the layers of that class in the model of that name. Raises NotTriedError.

    Heads have 64 numbers unless `config` says otherwise: kernels may leave odd ones to the layer.
    """
    context, modules = placed(subject, title, name, dtype, **({**sizes_of(name), **config}))
    if not modules:
        raise NotTriedError(f"it does not fit such layers: {config}")
    made = functions(subject.registered.bind(context), modules[:LAYERS])
    owns = [rotary_of(module) for module in modules[:LAYERS]]
    like = torch.empty(0, dtype=getattr(torch, context.requirements.dtype), device=context.device)
    each = zip(modules, owns, made, strict=False)
    return [Turning(m, own, new, like) for m, own, new in each if own]


def sizes_of(name: str) -> dict[str, Any]:
    """What gives a model heads of 64 numbers."""
    cls, own = arguments_of(name)
    if cls in ("DeepseekV3Config", "Gemma3nTextConfig"):  # of several sizes
        return {}
    sizes = {"hidden_size": 64 * own["num_attention_heads"]}
    return sizes if "head_dim" not in own or cls == "FalconConfig" else sizes | {"head_dim": 64}


def _as_layers(states: torch.Tensor) -> torch.Tensor:
    """A token's heads lie side by side."""
    return states.transpose(1, 2).contiguous().transpose(1, 2)


def _joined(states: torch.Tensor) -> torch.Tensor:
    """A token's heads are cut out of one product of queries, keys and values."""
    heads = states.shape[1]
    return _as_layers(torch.cat([states, states], 1))[:, :heads]


#: How queries and keys lie in memory, of the same numbers.
LYING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as layers have them": _as_layers,
    "head after head": torch.Tensor.contiguous,
    "cut out of one product": _joined,
    "every second number": lambda states: states.repeat_interleave(2, -1)[..., ::2],
    "numbers before tokens": lambda states: states.mT.contiguous().mT,
    "moved by one number": lambda states: torch.cat(
        [states.new_zeros(1), _as_layers(states).transpose(1, 2).flatten()]
    )[1:].view(_as_layers(states).transpose(1, 2).shape).transpose(1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """What is rotated: so many texts, and tokens of each.

    Attributes:
        part: Half of a head is turned.
        angles: Cosines and sines are of each text, "of one text" for all, the same "expanded", or
            "in float32".
        wide: What numbers are multiplied with.
    """

    texts: int
    tokens: int
    lying: str = "as layers have them"
    part: bool = False
    angles: str = ""
    wide: float = 1.0

    def __str__(self) -> str:
        parts = [f"{self.texts} x {self.tokens} tokens"]
        parts += [f"heads that lie {self.lying}"] if self.lying != "as layers have them" else []
        parts += ["half of a head turned"] if self.part else []
        parts += [f"angles {self.angles}"] if self.angles else []
        return ", ".join(parts + [f"numbers of about {self.wide:g}"] * (self.wide != 1))

    def made(self, turning: Turning, seed: int) -> list[torch.Tensor]:
        """Queries, keys, cosines, sines."""
        like, draw = turning.like, torch.Generator().manual_seed(seed)
        heads, kv_heads, size = heads_of(turning.module)

        def states(count: int) -> torch.Tensor:
            drawn = torch.randn(self.texts, count, self.tokens, size, generator=draw) * self.wide
            return LYING[self.lying](drawn.to(like))

        one = self.angles in ("of one text", "expanded")
        turned, texts = size // (1 + self.part), 1 if one else self.texts
        angles = 10 * torch.randn(texts, self.tokens, turned // 2, generator=draw).repeat(1, 1, 2)
        dtype = torch.float32 if self.angles == "in float32" else like.dtype
        cos, sin = (part.to(like.device, dtype) for part in (angles.cos(), angles.sin()))
        if self.angles == "expanded":
            cos, sin = cos.expand(self.texts, -1, -1), sin.expand(self.texts, -1, -1)
        return [states(heads), states(kv_heads), cos, sin]


TOKENS = (Turn(1, 1), Turn(1, 2), Turn(1, 65), Turn(1, 1025), Turn(1, 4097))
TEXTS = (Turn(2, 1), Turn(2, 3), Turn(65, 1), Turn(3, 257), Turn(1025, 1))
PARTS = tuple(Turn(*one, part=True) for one in ((1, 1), (1, 5), (2, 3), (1, 257)))
STRIDED = tuple(Turn(*one, lying=how) for how in LYING for one in ((1, 5), (3, 1), (2, 65)))
ANGLES = tuple(
    Turn(*one, angles=how) for how in ("of one text", "expanded") for one in ((1, 5), (3, 2))
)
#: Where the layer's dtype is narrower; some families' cosines are.
WIDER = tuple(Turn(*one, angles="in float32") for one in ((1, 1), (2, 3)))
EXTREME = tuple(Turn(2, 3, wide=wide) for wide in (1e-3, 100.0, 1e4))


class Heads(NamedTuple):
    """How many of queries and of keys, and how many numbers one has."""

    queries: int
    keys: int
    size: int


HEADS = tuple(Heads(*one) for one in (
    (1, 1, 12), (9, 3, 12), (40, 8, 12), (71, 1, 12), (4, 2, 8), (4, 2, 64), (4, 2, 80), (2, 1, 256)
))  # fmt: skip


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


def held(turning: Turning, given: list[torch.Tensor]) -> float:
    """Rotate by both; how far it is off, as a share of what rounding may be. Raises WrongError.

    A head may be off by four times what the layer's own is, and by some roundings of its largest
    number.
    """
    lent = Snapshot(**dict(zip(("queries", "keys", "cosines", "sines"), given, strict=True)))
    with torch.inference_mode():
        due = turning.own(*given)
        if due[0].dtype != given[0].dtype:  # such a layer is given no wider angles
            return 0.0
        exact = turning.own(*(one.double() for one in given))
        found = turning.made(*given)
    lent.check()
    worst = 0.0
    for number, (new, one, right) in enumerate(zip(pair_of(found), due, exact, strict=True)):
        what = ("queries", "keys")[number]
        if (new.shape, new.dtype, new.device) != (one.shape, one.dtype, one.device):
            raise WrongError(
                f"{what} become {new.dtype} {list(new.shape)} on {new.device}, and {one.dtype} "
                f"{list(one.shape)} on {one.device} is due"
            )
        lent.check_own(new)
        rounding = 8 * torch.finfo(one.dtype).eps * right.abs().amax(-1)
        allowed = 4 * (one - right).abs().amax(-1) + rounding
        off = (new.double() - right).abs().amax(-1)
        if (bad := ~(off <= allowed)).any():
            at = tuple(int(i) for i in bad.nonzero()[0])
            raise WrongError(
                f"head {at[1]} of the {what} of token {at[2]} of text {at[0]} is off by "
                f"{float(off[at]):.3g} (at most {float(allowed[at]):.2g} is rounding): "
                f"{_why(turning, given, number, new.double(), at)}"
            )
        worst = max(worst, float((off / allowed.clamp(min=1e-300)).max()))
    return worst


def pair_of(found: Any) -> Pair:
    """Raise WrongError unless it is two tensors."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise WrongError(f"it must return queries and keys, not {type(found).__name__}")
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise WrongError(f"it must return two tensors, not a {type(one).__name__}")
    return found[0], found[1]


def _why(
    turning: Turning, given: list[torch.Tensor], number: int, new: torch.Tensor, at: tuple[int, ...]
) -> str:
    """Which usual mistake it is, of the first head that is wrong."""
    mine, states = new[at], given[number].double()
    if not bool(mine.isfinite().all()):
        return "it is not finite"
    if not bool(mine.any()):
        return "it is all 0: nobody wrote it"
    if torch.equal(mine, states[at]):
        return "it is not turned"
    q, k, cos, sin = (one.double() for one in given)
    others = {
        "it is turned the other way": (cos, -sin),
        "it is turned by the first token's angles": (_first(cos, 1), _first(sin, 1)),
        "it is turned by the first text's angles": (_first(cos, 0), _first(sin, 0)),
        "sines and cosines change places": (sin, cos),
    }
    neighbours = torch.stack((-states[..., 1::2], states[..., ::2]), -1).flatten(-2)
    each = [one[..., : one.shape[-1] // 2].repeat_interleave(2, -1) for one in (cos, sin)]
    right, near = turning.own(q, k, cos, sin)[number], 0.02 * float(states[at].abs().max())

    def is_like(other: torch.Tensor) -> bool:
        return bool((mine - other).abs().max() < near < (right[at] - other).abs().max())

    if any(is_like(_paired(states, neighbours, *two)[at]) for two in ((cos, sin), each)):
        return "neighbours of a head are turned, and its halves are due"
    if q.shape == k.shape and is_like(turning.own(q, k, cos, sin)[1 - number][at]):
        return "queries and keys change places"
    for what, angles in others.items():
        if is_like(turning.own(q, k, *angles)[number][at]):
            return what
    turned = cos.shape[-1]
    rest = right[at][turned:]
    if torch.equal(rest, states[at][turned:]) and not torch.equal(mine[turned:], rest):
        return f"numbers from {turned} on stay as they are: cosines and sines have no more"
    same = ((right - mine).abs().amax(-1) < near).nonzero().tolist()
    if same and same[0] != [*at]:
        text, head, token = same[0]
        return f"it is what head {head} of token {token} of text {text} should be"
    bad = ((mine - right[at]).abs() > near).nonzero().flatten().tolist()
    if bad and bad[0] > 0 and bad == list(range(bad[0], len(mine))):
        return f"from number {bad[0]} of the head on"
    where = f"in {len(bad)} of its {len(mine)} numbers, {bad[0]} first" if bad else "a little"
    if len(bad) > len(mine) // 2:
        return f"{where}; no usual mistake explains it"
    return f"{where}; a product, or an angle, is rounded more"


def _paired(
    states: torch.Tensor, crossed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    if cos.shape[-1] != states.shape[-1]:
        return states
    return states * cos[:, None] + crossed * sin[:, None]


def _first(angles: torch.Tensor, dim: int) -> torch.Tensor:
    return angles.narrow(dim, 0, 1).expand_as(angles)


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
        _, modules = placed(subject, title, model, **sizes_of(model))
        own, like = rotary_of(modules[0]), torch.empty(0, device=subject.device)
    except (NotTriedError, IndexError):
        return ""
    if own is None:
        return f"it fits {title}, which calls no {ROTARY}: its `fits` has to refuse it"
    try:
        q, k = own(*Turn(2, 3).made(Turning(modules[0], own, own, like), 0))
        if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor):
            return ""
    except Exception:  # noqa: BLE001 - whoever wrote the model decides what it raises
        pass
    return (
        f"it fits {title}, whose {ROTARY} takes or returns something else than queries and keys: "
        "its `fits` has to refuse it"
    )


def _wrong(told: str, _: object) -> None:
    raise WrongError(told)


def _takes_parts(subject: Subject, title: str, model: str) -> bool:
    """Whether the layer's own function also turns a part of a head."""
    try:
        turning = turnings(subject, title, model)[0]
        return bool(turning.own(*Turn(1, 1, part=True).made(turning, 0)))
    except Exception:  # noqa: BLE001 - another check tells what the backend does wrong
        return False


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

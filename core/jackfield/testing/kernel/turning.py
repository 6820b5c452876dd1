"""What is rotated in the checks of rotations, and by which functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from jackfield.bridge.rotary import heads_of
from jackfield.contracts import BindContext, FusedRotary, rotary_of
from jackfield.testing.checks import NotTriedError
from jackfield.testing.kernel.layers import functions, placed
from jackfield.testing.models import arguments_of
from jackfield.testing.subject import Subject

LAYERS = 2  # what is done with each is done with the functions of so many

Rotation = Callable[..., Any]


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
    like = like_of(context)
    each = zip(modules, owns, made, strict=False)
    return [Turning(m, own, new, like) for m, own, new in each if own]


def like_of(context: BindContext) -> torch.Tensor:
    return torch.empty(0, dtype=getattr(torch, context.requirements.dtype), device=context.device)


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

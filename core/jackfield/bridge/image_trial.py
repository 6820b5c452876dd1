"""A small model with its processor, tried on the CPU: are images in our steps what they are in its?

The model's own forward call reads a text with two images by all that its processor returns. Then
the same text is read as the engine reads it: each image by itself, what the model says of it put
into the places of its tokens, in pieces, and in a batch with a text that has one image and one that
has none. What has not been shown to be right is not done.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence as Seq
from functools import partial
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from jackfield.bridge.batch_trial import SEED, apart, drawn
from jackfield.bridge.config_files import config_tree
from jackfield.bridge.forward import forward_of
from jackfield.bridge.image_chats import Places
from jackfield.bridge.image_encoder import TOKEN_TYPES, ImageEncoder, joined
from jackfield.bridge.image_parts import Picture, opened
from jackfield.bridge.image_reader import ImageReader, ImageRules, ReadImage, stacked
from jackfield.bridge.image_steps import Row, Shown, fed
from jackfield.bridge.model_layers import layer_types
from jackfield.bridge.packed_trial import packed_logits
from jackfield.bridge.quiet import quiet
from jackfield.bridge.shrinking import VOCAB, shrunk
from jackfield.contracts import ModelInputs
from jackfield.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger("jackfield")

_SIZES = ((32, 32), (30, 60))  # of two images, in pixels
_NAMED = 4  # the first id that a special token of a small model has
_PIECE, _PIECES = 7, 8  # tokens of a piece at least, pieces of a text at most
_OF_A_TOKEN = ("_token_id", "_token_index")  # names of fields
BOTH_WAYS = "the tokens of an image look at one another in both directions"
TOGETHER = "its processor makes other tokens of several images than of each alone"


def tried_with_images(
    config: PreTrainedConfig,
    cls: type[PreTrainedModel],
    reader: ImageReader,
    *,
    ragged: bool,
    packed: bool = False,
    alone: str | None = None,
) -> ImageRules | str:
    """By which rules images are read rightly, or why they are not.

    `ragged`: rows of several lengths are run together, and prompts in pieces. A text has two
    images, or one where a chat may have no more, for the reason `alone`. Where the model has to be
    told which tokens are an image's, it is tried with `token_types`, and prompts are whole; or,
    where steps are `packed`, with the layers that an image's tokens see one another in.
    """
    why = "none can be built"
    own, ids = _with_small_tokens(config)
    with quiet(), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
        for small in shrunk(own, cls):
            torch.manual_seed(SEED)
            try:
                bench = _Bench(drawn(small, cls, torch.float32), reader, ids, alone)
                return bench.trial(ragged=ragged, packed=packed)
            except Exception as error:  # noqa: BLE001 - any model's or processor's code
                why = first_line(error)
                logger.debug("no trial of images of %s: %s", config.model_type, why)
    return f"a small model of its kind could not be tried with images: {why}"


def _with_small_tokens(config: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[int, int]]:
    """A copy whose special tokens are among the first ones, and what each of them became."""
    found, ids = copy.deepcopy(config), dict[int, int]()
    for part in config_tree(found):
        for name, value in list(vars(part).items()):
            if name.endswith(_OF_A_TOKEN) and type(value) is int and value >= 0:
                setattr(part, name, ids.setdefault(value, _NAMED + len(ids)))
    return found, ids


class _Bench:
    """Three texts, with images, one, and none; and what the model itself says of them."""

    def __init__(
        self,
        model: PreTrainedModel,
        reader: ImageReader,
        small: dict[int, int],
        alone: str | None,
    ) -> None:
        self._model, self._reader, self._small, self._alone = model, reader, small, alone
        self._forward = forward_of(model)
        self._encoder = ImageEncoder(model)
        self._pictures = [_noise(*size) for size in _SIZES]
        token = reader.token
        which: tuple[int, ...] = (0,) if alone else (0, 1)
        first = " c ".join([token] * len(which))
        self._texts = {f"a b {first} d e f g": which, f"{token} h i j k": (1,)}
        self._texts["l m n o p q r s t"] = ()

    def trial(self, *, ragged: bool, packed: bool) -> ImageRules | str:
        rows = [self._row(text, which) for text, which in self._texts.items()]
        two, one, none = rows
        own = self._own(*next(iter(self._texts.items())))
        if own["input_ids"].tolist() != [two[0]]:
            return TOGETHER
        said = self._said(own)
        if apart(ours := self._read([two]), said):
            why = self._cause(own, ours)
            if why != BOTH_WAYS:
                return why
            self._encoder.token_types = next(name for name in TOKEN_TYPES if name in own)
            if apart(self._read([two]), said):
                return why
            if packed:
                alone = torch.cat([said, *(self._read([row]) for row in (one, none))])
                self._encoder.token_types = None
                return self._packed_trial([two, one, none], alone)
        rules = ImageRules(self._alone, self._encoder.token_types)
        if not ragged:
            return rules
        whole = self._encoder.token_types is not None
        piece = None if whole else max(_PIECE, -(-len(two[0]) // _PIECES))
        if piece and apart(self._read([two], piece=piece), said):
            return "a prompt with images that is read in pieces says something else"
        alone = torch.cat([said, *(self._read([row]) for row in (one, none))])
        if apart(self._read([two, one, none], piece=piece), alone):
            return "a row with images says something else beside another one"
        return rules

    def _packed_trial(
        self, rows: Seq[tuple[list[int], Shown]], alone: torch.Tensor
    ) -> ImageRules | str:
        """Find out in layers of which types an image's tokens see one another, in packed steps.

        `alone` are the logits of each row by itself. Gemma 3 has it in all, Gemma 4 in those with a
        window.
        """
        types = sorted(set(layer_types(self._model.config)))
        some = chain.from_iterable(combinations(types, n) for n in range(1, 1 + len(types)))
        read = partial(packed_logits, self._model, self._encoder, rows)
        right = [own for own in map(frozenset, some) if not apart(read(own), alone)]
        if len(right) != 1:  # none, or nobody can tell which
            return BOTH_WAYS
        longest = max(len(ids) for ids, _ in rows)
        piece = max(_PIECE, -(-longest // _PIECES))
        if apart(read(right[0], piece), alone):
            return "a prompt with images that is read in pieces says something else"
        return ImageRules(self._alone, blocks_in=right[0])

    def _row(self, text: str, which: Seq[int]) -> tuple[list[int], Shown]:
        """A text as the engine reads it: its ids, and its images."""
        read: list[ReadImage] = [
            self._reader.read("a trial", self._pictures[number]) for number in which
        ]
        places = Places(self._reader.token, [image.text for image in read])
        tokenizer = self._reader.processor.tokenizer
        ids = tokenizer(places.filled(text), add_special_tokens=False)["input_ids"]
        ids = [self._as_small(token) for token in ids]
        at = [n for n, token in enumerate(ids) if token == self._encoder.token]
        found = [self._encoder.read(image.fields) for image in read]
        if sum(map(len, found)) != len(at):
            raise ValueError(f"{sum(map(len, found))} rows for {len(at)} tokens of images")
        shown = Shown(at)
        if found:
            fields = [image.fields for image in read]
            shown.settle(joined(found), self._encoder.positions(ids, fields))
        return ids, shown

    def _as_small(self, token: int) -> int:
        first = _NAMED + len(self._small)
        return self._small.get(token, first + token % (VOCAB - first))

    def _own(self, text: str, which: Seq[int]) -> dict[str, Any]:
        """What the processor returns for a text, for the small model."""
        images = [self._pictures[number].image for number in which]
        found = stacked(self._reader.processor, text, images)
        ids = [self._as_small(token) for token in found["input_ids"][0].tolist()]
        return {**found, "input_ids": torch.tensor([ids])}

    def _said(self, own: dict[str, Any]) -> torch.Tensor:
        """The logits of all tokens by the model's own call: `[tokens, vocab]`."""
        logits: torch.Tensor = self._model(**own, use_cache=False).logits
        return logits[0]

    def _cause(self, own: dict[str, Any], ours: torch.Tensor) -> str:
        """What of the model's own call makes it say something else than ours."""
        positions = torch.arange(own["input_ids"].shape[1])[None]
        if not apart(ours, self._said({**own, "position_ids": positions})):
            return "it numbers the tokens of an image along several axes"
        without = {name: value for name, value in own.items() if name not in TOKEN_TYPES}
        if not apart(ours, self._said(without)):
            return BOTH_WAYS
        return "what it says of images is more than numbers in the places of their tokens"

    def _read(self, rows: Seq[tuple[list[int], Shown]], piece: int | None = None) -> torch.Tensor:
        """The logits of all tokens, row by row, read as the engine does: `[tokens, vocab]`."""
        longest = max(len(ids) for ids, _ in rows)
        gaps = [longest - len(ids) for ids, _ in rows]
        ids = torch.tensor([[0] * gap + own for gap, (own, _) in zip(gaps, rows, strict=True)])
        valid = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        past, said = DynamicCache(config=self._model.config), []
        for begin in range(0, longest, piece or longest):
            end = min(longest, begin + (piece or longest))
            kwargs: dict[str, Any] = {
                "input_ids": ids[:, begin:end],
                "position_ids": positions[:, begin:end],
                "attention_mask": None if bool(valid[:, :end].all()) else valid[:, :end],
                "past_key_values": past,
                "use_cache": True,
                "logits_to_keep": end - begin,
            }
            parts = [
                Row(own[max(0, begin - gap) : max(0, end - gap)], max(0, begin - gap), shown, at)
                for at, (gap, (own, shown)) in enumerate(zip(gaps, rows, strict=True))
            ]
            kwargs |= fed(self._encoder, parts, kwargs["position_ids"])
            said.append(self._forward(ModelInputs(kwargs, len(rows))))
        return torch.cat([own[gap:] for gap, own in zip(gaps, torch.cat(said, 1), strict=True)])


def _noise(width: int, height: int) -> Picture:
    from PIL import Image

    data = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
    return opened("a trial", Image.fromarray(data.numpy()))

"""What a model makes of images: numbers in place of the tokens that stand for them.

`get_image_features` of transformers' models makes them, and their forward call takes them again as
`mm_encoder_outputs`, where it puts them in the places of tokens by itself, in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from jackfield.devices import input_device
from jackfield.errors import ExecutionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TAKEN = "mm_encoder_outputs"
#: Arguments that tell a model which tokens are an image's, where those see one another.
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_DEEP = "deepstack_features"  # what Qwen3-VL adds behind its first layers


@dataclass(frozen=True, eq=False)
class Features:
    """What a model says of images, a row for each of their tokens.

    `rows` is `[tokens, size]`; `deep` are as many rows for each layer that has some added.
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, begin: int, end: int) -> Features:
        """Those of some tokens; views."""
        return Features(self.rows[begin:end], tuple(layer[begin:end] for layer in self.deep))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, *self.deep))


def joined(parts: Seq[Features]) -> Features:
    """Those of several images, or parts of them, in their order."""
    if len(parts) == 1:
        return parts[0]
    layers = zip(*(part.deep for part in parts), strict=True)
    return Features(torch.cat([p.rows for p in parts]), tuple(map(torch.cat, layers)))


class _EmbeddedError(Exception):
    """A model has embedded its tokens, and need not go on."""


def image_token(model: PreTrainedModel) -> int:
    """The token that stands for images; -1 where its config names none."""
    found = getattr(model.config, "image_token_id", None)
    return found if isinstance(found, int) else -1


class ImageEncoder:
    """What reads the images of `model`, one at a time: none is padded for another.

    `token_types`: the argument that tells it which tokens of a step are an image's, where those see
    one another; None: they do not.
    """

    def __init__(self, model: PreTrainedModel, token_types: str | None = None) -> None:
        own: Any = model
        self._model, self.token_types = own, token_types
        self._device = input_device(model)
        taken = inspect.signature(own.get_image_features).parameters
        self._takes = frozenset(taken)
        self.token = image_token(model)
        self._numbering = getattr(own.base_model, "get_rope_index", None)
        self._listed = True  # whether the model joins what it says of several images

    def read(self, fields: Mapping[str, Any]) -> Features:
        """What it says of an image that its processor made `fields` of. Raises ExecutionError."""
        given = {name: self._placed(v) for name, v in fields.items() if name in self._takes}
        said = self._model.get_image_features(**given, return_dict=True)
        rows = said.pooler_output
        self._listed = not isinstance(rows, torch.Tensor)
        found = Features(_rows(rows), tuple(map(_rows, getattr(said, _DEEP, None) or ())))
        if any(len(layer) != len(found) for layer in found.deep):
            raise ExecutionError("the model adds other numbers of rows behind its first layers")
        return found

    def positions(self, ids: Seq[int], images: Seq[Mapping[str, Any]]) -> torch.Tensor | None:
        """Where the tokens of a prompt with these images are along each axis: `[axes, tokens]`.

        None: a token is where it stands.
        """
        if self._numbering is None:
            return None
        tokens = torch.tensor([list(ids)])
        takes = inspect.signature(self._numbering).parameters
        given: dict[str, Any] = {}
        if "mm_token_type_ids" in takes:
            given["mm_token_type_ids"] = (tokens == self.token).int()
        for name in images[0].keys() & takes.keys():
            if isinstance(images[0][name], torch.Tensor):
                given[name] = torch.cat([fields[name] for fields in images])
        found: torch.Tensor = self._numbering(tokens, **given)[0]
        return found[:, 0].cpu()

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self._model.dtype if value.is_floating_point() else value.dtype
        return value.to(self._device, dtype)

    def of_a_text(self, like: Features) -> Features:
        """The row of a token that stands for no image: what its embedding is, and nothing added."""
        row = self._embedded().to(like.rows)
        return Features(row, tuple(torch.zeros_like(layer[:1]) for layer in like.deep))

    def _embedded(self) -> torch.Tensor:
        """What the model makes of the token where no image is: `[1, size]`.

        Gemma 4 embeds the token of padding in its place, so the model is asked, up to there.
        """
        found: list[torch.Tensor] = []

        def stop(_module: Any, _args: Any, output: torch.Tensor) -> None:
            found.append(output)
            raise _EmbeddedError

        embedding = self._model.get_input_embeddings()
        hook = embedding.register_forward_hook(stop)
        try:
            self._model(torch.tensor([[self.token]], device=self._device), use_cache=False)
        except _EmbeddedError:
            pass
        finally:
            hook.remove()
        return found[0][0]

    def arguments(self, parts: Seq[Features]) -> dict[str, Any]:
        """What the model is called with for a step with these in the places of its tokens."""
        whole = joined(parts)
        said = SimpleNamespace(
            pooler_output=[whole.rows] if self._listed else whole.rows,
            deepstack_features=[[layer] for layer in whole.deep],
        )
        return {TAKEN: {"image": said}}


def _rows(said: Any) -> torch.Tensor:
    """One tensor `[tokens, size]` of what a model says of an image, or of its pieces."""
    parts = [said] if isinstance(said, torch.Tensor) else list(said)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

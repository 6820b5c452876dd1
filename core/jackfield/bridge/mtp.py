"""A model's own heads for multi-token prediction, as transformers' `MtpModel` has them.

Head number k reads, for each token of a text, what the head before it made of that token (the first
one: the model's last hidden state) and the embedding of the token k + 1 places behind, and says
what follows that one (DeepSeek-V3, arXiv:2412.19437; heads side by side: Gloeckle et al. 2024,
arXiv:2404.19737). Embeddings and output head are the model's own modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import cache_utils, modeling_layers

from jackfield.bridge.hub_files import cached_folder
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.quiet import quiet
from jackfield.contracts.compiling import TRACING
from jackfield.contracts.requirements import BYTES
from jackfield.errors import CheckpointError, PlanError, first_line
from jackfield.foreign import named

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from jackfield.bridge.source import ModelSource

_Mtp: Any = getattr(modeling_layers, "MtpModel", None)
if not hasattr(_Mtp, "get_mtp_weights_regex"):  # one that cannot read them, before 5.20
    _Mtp = None
_Cache: Any = getattr(cache_utils, "MtpCache", None)
#: Layers of a cache that keep the keys and values of a text, take some back, and nothing else.
_LAYERS = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


@dataclass(frozen=True)
class HeadsFound:
    """The heads of a model, before they are read: how many, and what their weights take."""

    layers: int
    weight_bytes: int


def without_heads(model: PreTrainedModel) -> str | None:
    """Why `model` has no heads that can draft; None: transformers makes some of its config.

    Whether their weights are in its checkpoint is another matter.
    """
    config = model.config
    count = getattr(config.get_text_config(decoder=True), "num_mtp_layers", None)
    if type(count) is not int or count < 1:
        return f"the config of {type(model).__name__} has none (num_mtp_layers={count})"
    if _Mtp is None or _Cache is None:
        return f"transformers {transformers.__version__} makes none (5.20 does)"
    if config.get_text_config(decoder=True) is not config:
        return f"{type(model).__name__} has its text model inside of another"
    try:
        _Mtp.get_mtp_weights_regex(model)
    except (TypeError, ValueError):
        return f"transformers does not know which weights of {type(model).__name__} they are"
    return None


def heads_found(source: ModelSource, dtype: str, tensors: Collection[str]) -> HeadsFound:
    """The heads of a model of which `without_heads` is None; reads nothing.

    `tensors` are the names in its checkpoint; none: it is not here yet. Raises PlanError.
    """
    model = meta_model(source.config, None if source.live is None else type(source.live))
    who = type(model).__name__
    if tensors and not any(map(_Mtp.get_mtp_weights_regex(model).search, tensors)):
        raise PlanError(
            f"the checkpoint of this {who} has no weights of heads for multi-token prediction, "
            "which its config counts (num_mtp_layers); choose another decoding, or a checkpoint "
            "that has them"
        )
    try:
        with quiet(), TRACING, torch.device("meta"):
            made = _Mtp(model, model.config.num_mtp_layers)
            kept = cache_of(made).layers
    except Exception as error:
        raise PlanError(
            f"transformers makes no heads for multi-token prediction of this {who}: "
            f"{first_line(error)}; choose another decoding"
        ) from error
    if len(kept) != len(made.layers) or {*map(type, kept)} - {*_LAYERS} or not model._supports_sdpa:
        raise PlanError(
            f"the heads of this {who} attend in another way than by keys and values in sdpa; "
            "choose another decoding"
        )
    numbers = sum(p.numel() for module in _own(made) for p in module.parameters())
    return HeadsFound(len(made.layers), numbers * BYTES[dtype])


def cache_of(made: Any) -> Any:
    """A new cache for a text that the heads `made` read, which takes tokens back."""
    cache = _Cache(config=made.config)
    cache.activate_past_recording()
    return cache


def _own(heads: Any) -> list[nn.Module]:
    """The modules that are not the model's."""
    shared = getattr(heads, "shared_post_norm", None)
    return [heads.layers] if shared is None else [heads.layers, shared]


def checkpoint_of(source: ModelSource) -> Path | None:
    """The folder on this machine that a model's weights came from; None: there is none."""
    if source.live is None:
        return source.folder or cached_folder(source.location or "", source.revision)
    name = source.live.config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    return cached_folder(name, getattr(source.live.config, "_commit_hash", None))


def read_heads(model: PreTrainedModel, source: ModelSource) -> Any:
    """Read the heads of `model`, which was read from `source`, to where its last layer computes.

    Raises CheckpointError, also where one of their weights is missing.
    """
    folder = checkpoint_of(source)
    if folder is None:
        raise CheckpointError(
            f"the heads of this {type(model).__name__} cannot be read: no folder here has its "
            "weights; give the folder that they were read from"
        )
    device = next(model.get_decoder().layers[-1].parameters()).device
    with named(f"cannot read the heads in {folder}"), quiet(), TRACING, _read_from(model, folder):
        heads = _Mtp.from_pretrained(model, device_map={"": device})
    for module in _own(heads):
        if model.dtype != model.config.dtype:  # a live one that was cast
            module.to(model.dtype)
        module.eval()
        module.requires_grad_(False)
    return heads


@contextlib.contextmanager
def _read_from(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """`MtpModel` looks for a checkpoint by a name in the model's config, at no revision."""
    before = model.config.name_or_path
    model.config.name_or_path = str(folder)
    try:
        yield
    finally:
        model.config.name_or_path = before


class LastStates:
    """Keeps the hidden states of a step that a model's heads read: `[rows, n, hidden]`.

    Those are what the decoder returns, behind its norm; where the config has
    `tie_last_hidden_states=False`, what its last layer does.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        tied = getattr(decoder.config, "tie_last_hidden_states", None) is not False
        self._module: nn.Module = decoder if tied else decoder.layers[-1]
        self._states: torch.Tensor | None = None
        self._thread: int | None = None  # whose call is a step's

    def __deepcopy__(self, known: dict[int, Any]) -> LastStates:
        """A copy of the model has a hook that looks at nothing."""
        found: LastStates = object.__new__(LastStates)
        found._states = found._thread = None
        return found

    def install(self) -> Callable[[], None]:
        """Look on from now on. Returns what ends it."""
        handle = self._module.register_forward_hook(self._note)

        def remove() -> None:
            handle.remove()
            self._states = None

        return remove

    def begin(self) -> None:
        """The next call of this thread is a step's; others may call the model for themselves."""
        self._states, self._thread = None, get_ident()

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._thread == get_ident():
            self._states = output if isinstance(output, torch.Tensor) else output[0]

    def taken(self) -> torch.Tensor:
        """The states; they are kept no longer."""
        states, self._states, self._thread = self._states, None, None
        assert states is not None
        return states

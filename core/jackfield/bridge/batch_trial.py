"""A small model of a kind, tried on the CPU: does a row say in a batch what it says alone?

Whatever a model does over its columns (the best of all keys, means over time, experts with so many
places, blocks of keys, positions counted from a mask) may take padding for tokens, and no config
says so. So a model of the same classes with few, narrow layers and random weights reads rows of
padded columns as `PaddedKVCache` would lay them out, and its logits are compared with those of each
row alone; so are those with a cache of fixed shape, whose last columns are empty. What has not been
shown to be right is not done.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache

from jackfield.bridge.config_files import config_tree
from jackfield.bridge.forward import forward_of
from jackfield.bridge.model_layers import layer_types
from jackfield.bridge.quiet import quiet
from jackfield.bridge.shrinking import VOCAB, build, shrunk
from jackfield.contracts import ModelInputs
from jackfield.errors import first_line

logger = logging.getLogger("jackfield")

_LONG, _SHORT, _NEW = 24, 19, 3  # tokens of the two prompts, and after them
_PIECE = 7
_COLUMNS = 2 * _LONG  # of a cache of fixed shape
SEED = 5
_OTHERS = 8  # texts that are tried where what a model says may depend on the number of columns
#: How far logits of the same row may lie apart, as a share of how far they spread.
_BOUND = 1e-3


@dataclass(frozen=True)
class Trial:
    """What goes wrong, as evidence; None where it was right.

    `failed`: nothing was seen. `batch`: rows of one length in a batch. `ragged`: rows of several,
    padded at the left. `pieces`: prompts that are read in several steps. `holes`: columns that are
    masked out after they were read. `fixed`: a cache that has more columns than were written.
    """

    failed: str | None = None
    batch: str | None = None
    ragged: str | None = None
    pieces: str | None = None
    holes: str | None = None
    fixed: str | None = None


def tried(
    config: PreTrainedConfig,
    cls: type[PreTrainedModel] | None,
    dtype: torch.dtype,
    trial: Callable[[PreTrainedModel], Trial],
) -> Trial:
    """The trial of models of `config`, once for all that are alike."""
    return _tried(Asked.of(config), cls, dtype, trial)  # type: ignore[arg-type]  # is hashable


@dataclass(frozen=True, eq=False)
class Asked:
    """A config by its text, for what is found out once for all that are alike."""

    key: str
    config: PreTrainedConfig

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Asked:
        return cls(json.dumps(config.to_dict(), default=str, sort_keys=True), config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=256)
def _tried(
    asked: Asked,
    cls: type[PreTrainedModel] | None,
    dtype: torch.dtype,
    trial: Callable[[PreTrainedModel], Trial],
) -> Trial:
    why = "none can be built"
    with quiet(), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
        for small in shrunk(asked.config, cls):
            torch.manual_seed(SEED)
            try:
                return trial(drawn(small, cls, dtype))
            except Exception as error:  # noqa: BLE001 - any model's code
                why = first_line(error)
                logger.debug("no trial of %s: %s", asked.config.model_type, why)
    reason = f"a small model of its kind could not be tried: {why}"
    return Trial(why, None, reason, reason, reason, reason)


def drawn(
    config: PreTrainedConfig, cls: type[PreTrainedModel] | None, dtype: torch.dtype
) -> PreTrainedModel:
    """A model with weights that make what it says depend on all that it has read."""
    for part in config_tree(config):
        part._attn_implementation_internal = "eager"
        part._experts_implementation_internal = "eager"
    model = build(config, cls)
    model.eval().to(dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def apart(found: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether logits are further from those that are right than rounding explains."""
    return not bool((found - alone).abs().max() <= _BOUND * alone.std())


def decoder_trial(model: PreTrainedModel) -> Trial:
    """What goes wrong with `model`, a decoder."""
    return _Bench(model).trial()


class _Bench:
    """Rows of a model, read in steps of its dynamic cache as `PaddedKVCache` lays them out."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._forward = forward_of(model)
        # Layers with a state compute single tokens by other code than longer pieces.
        states = "linear_attention" in layer_types(model.config)
        self._sizes = (_PIECE, 1) if states else (_PIECE,)
        vocab = min(VOCAB, model.config.get_text_config(decoder=True).vocab_size)
        self._rows = [torch.randint(4, vocab, (n + _NEW,)).tolist() for n in (_LONG, _LONG, _SHORT)]
        # What padding is must not matter, so here it is anything.
        self._padding = torch.randint(0, vocab, (_LONG,)).tolist()
        self._alone = {id(row): self._read([row]) for row in self._rows}

    def trial(self) -> Trial:
        first, second, short = self._rows
        batch = self._differs([first, second]) and "a row says something else beside another one"
        ragged = self._padded()
        holes = self._differs([short], hole=True) and "a token that is masked out is still seen"
        pieces = self._pieces(first) and "a prompt read in pieces says something else"
        if not (ragged or pieces) and self._pieces(first, short):
            ragged = "a row that waits for a longer one says something else"
        fixed = self._fixed([first] if ragged else [first, short])
        if fixed and not ragged:  # what hangs on the number of columns few texts show
            others = (_Bench(self._model) for _ in range(_OTHERS))
            ragged = next((why for other in others if (why := other._padded())), False)
        # What depends on the number of columns may do so in any piece, also where none showed it.
        return Trial(
            None, batch or None, ragged or None, pieces or ragged or None, holes or None, fixed
        )

    def _padded(self) -> str | Literal[False]:
        first, _, short = self._rows
        differs = self._differs([first, short, short])
        return differs and "a row padded at the left says something else"

    def _fixed(self, rows: Seq[list[int]]) -> str | None:
        """Also where scores are alike, and which of them are the best depends on their number."""
        try:
            if self._changes(rows):
                return "what it says changes with their number"
            for parameter in self._model.parameters():
                if parameter.dim() == 1:
                    parameter.round_()  # 0 or 1, as layers begin with: many scores are the same
            differs = self._changes(rows)
        except Exception as error:  # noqa: BLE001 - any model's code
            return f"a small model of its kind fails with one: {first_line(error)}"
        return "which of equal scores it keeps changes with their number" if differs else None

    def _changes(self, rows: Seq[list[int]]) -> bool:
        alone = torch.cat([self._read([row]) for row in rows])
        return apart(self._read(rows, columns=_COLUMNS), alone)

    def _pieces(self, *rows: list[int]) -> bool:
        try:
            sizes = self._sizes if len(rows) == 1 else (_PIECE,)
            return any(self._differs(rows, piece=size) for size in sizes)
        except Exception:  # noqa: BLE001 - any model's code; linear layers may not go on
            return True

    def _differs(self, rows: Seq[list[int]], **how: Any) -> bool:
        """Whether any of the rows says something else than alone; a NaN is something else."""
        alone = torch.cat([self._alone[id(row)] for row in rows])
        return apart(self._read(rows, **how), alone)

    def _read(
        self,
        rows: Seq[list[int]],
        *,
        piece: int = _LONG,
        hole: bool = False,
        columns: int | None = None,
    ) -> torch.Tensor:
        """The logits of each row's last prompt token and of what follows: `[rows, 1 + new, vocab]`.

        The prompts are read `piece` columns at a time. With `hole`, they are followed by a token
        that is masked out. With `columns`, the cache has so many from the beginning.
        """
        longest = max(map(len, rows))
        gaps = [longest - len(row) for row in rows]
        padding = [self._padding[at : at + gap] for at, gap in enumerate(gaps)]
        ids = torch.tensor([gap + row for gap, row in zip(padding, rows, strict=True)])
        valid = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        prompt = longest - _NEW
        ends = [*range(piece, prompt, piece), *range(prompt, longest + 1)]
        if hole:
            ids, valid, positions = (
                torch.cat([part[:, :prompt], part[:, at : at + 1], part[:, prompt:]], 1)
                for part, at in ((ids, 0), (valid, prompt - 1), (positions, prompt))
            )
            ends.append(longest + 1)
        past: Cache = DynamicCache(config=self._model.config)
        if columns is not None:
            past = StaticCache(config=self._model.config, max_cache_len=columns)
        said, begin = [], 0
        for end in ends:
            if hole and end == prompt + 2:
                valid[:, prompt] = 0
            whole = bool(valid[:, :end].all())
            kwargs = {
                "input_ids": ids[:, begin:end],
                "position_ids": positions[:, begin:end],
                "attention_mask": None if whole else valid[:, :end],
                "past_key_values": past,
                "use_cache": True,
                "logits_to_keep": 1,
            }
            logits = self._forward(ModelInputs(kwargs, len(rows)))[:, -1:]
            if end >= prompt and not (hole and end == prompt + 1):
                said.append(logits)
            begin = end
        return torch.cat(said, 1)

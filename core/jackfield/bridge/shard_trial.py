"""A small model of a kind, shared by the processes that are to share the large one.

transformers' tensor parallel plan says how a model is cut, and a plan may be wrong for a model. So
one of the same classes with few, narrow layers and random weights is read by all processes as the
large one will be, and what it says is compared with the same model whole. It takes a fraction of a
second. What has not been shown to be right is not done.

Where a quantizer puts layers of its own in place, plain ones stand for these, since not all of them
take such small matrices: shown is what processes do around them. What a quantizer makes of its part
of a large matrix is compared with the file when it was read (`read_back.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from jackfield.bridge.batch_trial import apart, drawn
from jackfield.bridge.config_files import config_tree
from jackfield.bridge.footprint import weights_of
from jackfield.bridge.layer_configs import of_all
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.quiet import quiet
from jackfield.bridge.sharding import Shard, loading
from jackfield.bridge.shared_layers import connect
from jackfield.bridge.shared_models import part_of, with_whole
from jackfield.bridge.shrinking import VOCAB, shrunk
from jackfield.contracts.quantizing import own_part
from jackfield.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SEED, _TOKENS = 11, 24


def shard_trial(
    config: PreTrainedConfig, shard: Shard, experts_implementation: str | None, *, stored: bool
) -> str | None:
    """Why models of `config` say something else where processes share them; None: they do not.

    `stored`: a quantizer puts layers of its own in place. All processes must call it, after torch
    has their process group.
    """
    why = "none can be built"
    with quiet(), torch.inference_mode(), torch.random.fork_rng(devices=()):
        for small in shrunk(config, None):
            _as_numbers(small)
            _share_heads(small, shard.size)
            if config.get_text_config(decoder=True).vocab_size % shard.size == 0:
                _share_vocabulary(small, shard.size)
            torch.manual_seed(_SEED)
            try:
                return _compared(small, shard, experts_implementation, stored)
            except Exception as error:  # noqa: BLE001 - any model's code
                why = first_line(error)
    return f"a small model of its kind could not be shared: {why}"


def _as_numbers(config: PreTrainedConfig) -> None:
    """Have weights read as they are drawn, also where those of the large model are packed."""
    for part in config_tree(config):
        vars(part).pop("quantization_config", None)


def _share_heads(config: PreTrainedConfig, size: int) -> None:
    """See that each of `size` processes gets heads, as it does of the large model."""
    for part in config_tree(config):
        heads = of_all(part, "num_attention_heads")
        groups = of_all(part, "num_key_value_heads") or heads
        if isinstance(heads, int) and isinstance(groups, int) and groups % size:
            times = size // math.gcd(groups, size)
            if of_all(part, "head_dim") is None and hasattr(part, "hidden_size"):
                part.hidden_size *= times
            part.num_attention_heads = times * heads
            if of_all(part, "num_key_value_heads") is not None:
                part.num_key_value_heads = times * groups


def _share_vocabulary(config: PreTrainedConfig, size: int) -> None:
    """See that the vocabulary divides, as that of the large model does (transformers 5.17)."""
    for part in config_tree(config):
        if isinstance(vocab := getattr(part, "vocab_size", None), int):
            part.vocab_size = vocab + -vocab % size


def _compared(
    config: PreTrainedConfig, shard: Shard, experts_implementation: str | None, stored: bool
) -> str | None:
    whole = drawn(config, None, torch.float32)
    with loading(shard) as how:
        shared: PreTrainedModel = type(whole).from_pretrained(
            None,
            config=whole.config,
            state_dict=whole.state_dict(),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation=experts_implementation,
            **how,
        )
    if stored:
        _replace_layers(shared, config, shard)
    shared.eval()
    vocab = min(VOCAB, config.get_text_config(decoder=True).vocab_size)
    ids = torch.randint(4, vocab, (1, _TOKENS)).to(shared.device)
    whole.to(shared.device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    if apart(shared(input_ids=ids).logits, whole(input_ids=ids).logits):
        return "a small model of its kind says something else where processes share it"
    return None


class _Layer(nn.Module):
    """A linear layer of a part of a matrix, in place of one that transformers has cut."""

    def __init__(self, cut: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(own_part(cut.weight))
        self.bias = None if cut.bias is None else nn.Parameter(own_part(cut.bias))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return linear(given, self.weight, self.bias)


def _replace_layers(model: PreTrainedModel, config: PreTrainedConfig, shard: Shard) -> None:
    part = part_of(config, shard)
    weights = with_whole(weights_of(part), weights_of(meta_model(config)))
    for weight in weights:
        if weight.linear is not None:
            path = weight.name.removesuffix(".weight")
            model.set_submodule(path, _Layer(model.get_submodule(path)))
    connect(model, part, weights, shard)

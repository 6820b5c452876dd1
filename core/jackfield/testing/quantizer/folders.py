"""Checkpoints of small random models in folders, which a quantizer reads.

Their sizes are no powers of two, and no two are equal, so that what is exchanged shows. Each has
the tokenizer of the demo model, for quantizers that measure a model on texts.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers.pytorch_utils import Conv1D

from jackfield.demo import MODEL_PATH
from jackfield.testing.checks import NotTriedError

VOCAB = 768  # of the demo model's tokenizer
_LAYERS = 2

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SMALL = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
_WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
_BIASES = {"attention_bias": True, "mlp_bias": True}

#: name -> the config's class and its arguments, which add to those that all share.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "small": ("LlamaConfig", {**_SMALL, **_BIASES}),
        "wide": ("LlamaConfig", {**_WIDE, **_BIASES}),
        "rows": ("LlamaConfig", {**_SMALL, **_BIASES}),
        "rows wide": ("LlamaConfig", {**_WIDE, **_BIASES}),
        "tied": ("LlamaConfig", {**_SMALL, "tie_word_embeddings": True}),
        "odd sizes": ("LlamaConfig", {"hidden_size": 44, "intermediate_size": 58, "head_dim": 14}),
        "transposed": ("GPT2Config", {"n_embd": 96, "n_head": 3, "n_layer": _LAYERS}),
        "experts": ("MixtralConfig", {**_SMALL, "num_local_experts": 3, "num_experts_per_tok": 2}),
        "joined": (
            "HrmTextConfig",
            {**_SMALL, "num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1, "prefix_lm": False},
        ),
    }
)


@dataclass(frozen=True, eq=False)
class Original:
    """A model in a folder, and what it holds: float64, by the names of its state dict.

    `matrices` has the `[out_features, in_features]` of each linear layer but the head, by path.
    """

    folder: Path
    state: Mapping[str, torch.Tensor]
    matrices: Mapping[str, torch.Tensor]
    model: transformers.PreTrainedModel

    def bias(self, path: str, out_features: int) -> torch.Tensor:
        """float64 `[out_features]`; zeros where the layer has none."""
        found = self.state.get(f"{path}.bias")
        return torch.zeros(out_features, dtype=torch.float64) if found is None else found


def write(name: str, into: Path | None, seed: int) -> Original:
    """One of `MODELS` as a folder inside `into`. Raises NotTriedError without its class."""
    return _saved(_built(name, seed), into, name)


def _saved(model: transformers.PreTrainedModel, into: Path | None, name: str) -> Original:
    folder = Path(tempfile.mkdtemp(dir=into, prefix=f"{name.replace(' ', '-')}-"))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(folder)
    state = {key: value.double() for key, value in model.state_dict().items()}
    return Original(folder, state, dict(_matrices(model)), model)


def write_part(original: Original, into: Path | None, size: int, rank: int) -> Original:
    """The same with one of `size` parts of the features of each MLP, in a folder."""
    config = copy.deepcopy(original.model.config)
    config.intermediate_size //= size
    own = slice(rank * config.intermediate_size, (rank + 1) * config.intermediate_size)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict({
        name: tensor[own] if _kind(name.rpartition(".")[0]) in ("gate_proj", "up_proj")
        else tensor[:, own] if name.endswith("down_proj.weight") else tensor
        for name, tensor in original.model.state_dict().items()
    })  # fmt: skip
    model.generation_config = original.model.generation_config
    return _saved(model, into, "part")


def _built(name: str, seed: int) -> transformers.PreTrainedModel:
    cls, arguments = MODELS[name]
    if not hasattr(transformers, cls):
        raise NotTriedError(f"transformers {transformers.__version__} has no {cls}")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        config = getattr(transformers, cls)(**{**_SHARED, **arguments})
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and module.bias is not None:
                torch.nn.init.normal_(module.bias)
            if name.startswith("rows") and isinstance(module, torch.nn.Linear):
                _SPECIAL[_kind(path)](module.weight.data)
    model.generation_config.pad_token_id = 0
    return model.eval()  # type: ignore[no-any-return]


def _kind(path: str) -> str:
    return path.rpartition(".")[2]


def _zero(weight: torch.Tensor) -> None:
    weight[::5] = 0
    weight[1, :] = 0


def _constant(weight: torch.Tensor) -> None:
    weight[::3] = weight[::3, :1]


def _positive(weight: torch.Tensor) -> None:
    weight.abs_()


def _negative(weight: torch.Tensor) -> None:
    weight.abs_().neg_()


def _outlier(weight: torch.Tensor) -> None:
    weight[7, 11] = 30.0


def _as_drawn(weight: torch.Tensor) -> None:
    del weight


#: What is odd in the model "rows": by the name of the layer.
_SPECIAL: dict[str, Callable[[torch.Tensor], None]] = {
    "q_proj": _zero,
    "k_proj": _constant,
    "v_proj": _positive,
    "o_proj": _negative,
    "gate_proj": _outlier,
    "up_proj": _as_drawn,
    "down_proj": _zero,
    "lm_head": _as_drawn,
}


def _matrices(model: Any) -> list[tuple[str, torch.Tensor]]:
    found = []
    for path, module in model.named_modules():
        if module is model.get_output_embeddings():
            continue
        if isinstance(module, torch.nn.Linear):
            found.append((path, module.weight.detach().double()))
        elif isinstance(module, Conv1D):
            found.append((path, module.weight.detach().double().T))
    return found

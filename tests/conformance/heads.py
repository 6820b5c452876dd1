"""Checkpoints of tiny models with heads for multi-token prediction, as released ones have them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from families import _GATED, _MOE, MORE_FAMILIES, WINDOW
from safetensors.torch import load_file, save_file

LAYERS = 2  # of the models, without heads
_MIXED = ["sliding_attention", "full_attention"]
_DEEP = {**MORE_FAMILIES["deepseek-v3"].arguments}
_GLM = {
    **_GATED, **_MOE, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True,
}  # fmt: skip
#: family -> config class, arguments, how many heads
HEADED = {
    "deepseek-v3": ("DeepseekV3Config", _DEEP, 2),
    "glm4-moe": ("Glm4MoeConfig", _GLM, 3),
    "mellum": (
        "MellumConfig",
        {**_GATED, **_MOE, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _MIXED},
        1,
    ),
}
#: What of a layer is added to what it was given.
_ADDED = ("o_proj.weight", "down_proj.weight")


def headed_config(family: str, more: int = 0, heads: int | None = None) -> Any:
    """The config; with `more` layers, those of the heads, which are no heads then."""
    name, arguments, count = HEADED[family]
    arguments = {**arguments, "num_hidden_layers": LAYERS + more}
    if not more:
        arguments["num_mtp_layers"] = count if heads is None else heads
    elif "layer_types" in arguments:
        arguments["layer_types"] = [*arguments["layer_types"], *["sliding_attention"] * more]
    config = getattr(transformers, name)(**arguments)
    config._experts_implementation = "eager"
    return config


def patterns(family: str) -> list[str]:
    """The names of heads' weights; transformers knows those of models of the released depth."""
    if family == "mellum":
        return [r"^mtp\."]
    return [rf"model\.layers\.{LAYERS + n}\..*" for n in range(HEADED[family][2])]


def model_class(family: str) -> Any:
    config = headed_config(family)
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


@functools.cache
def checkpoint(family: str, share: float | None = None, heads: bool = True) -> str:
    """A folder with a model in float64 and the weights of its heads.

    With `share` all layers add so little of what they compute, and the heads pass their token on,
    so that what follows a token hangs on that token, and drafts are often right.
    """
    folder = Path(tempfile.mkdtemp(prefix="jackfield-heads-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    count = HEADED[family][2]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            headed_config(family, count), dtype=torch.float64, attn_implementation="eager"
        )
        size = model.config.hidden_size
        mixing = torch.randn(count, size, 2 * size, dtype=torch.float64) * 0.35
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(7)
                )
            if share is not None and name.endswith((*_ADDED, "down_proj")):
                parameter *= share
        if share is not None:
            mixing[:, :, :size] = torch.eye(size) * 10
            mixing[:, :, size:] *= share
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    ends = weights["model.norm.weight"]
    extra: dict[str, torch.Tensor] = {}
    for n in range(count):
        old = f"model.layers.{LAYERS + n}."
        new = "mtp.layers.0." if family == "mellum" else old
        extra |= {new + k.removeprefix(old): weights.pop(k) for k in [*weights] if old in k}
        norm = torch.ones(size, dtype=torch.float64)
        if family == "mellum":
            extra |= {
                "mtp.fc.weight": mixing[n], "mtp.norm.weight": ends.clone(),
                "mtp.pre_fc_norm_embedding.weight": norm,
                "mtp.pre_fc_norm_hidden.weight": norm.clone(),
            }  # fmt: skip
        else:
            extra |= {
                f"{old}eh_proj.weight": mixing[n], f"{old}shared_head.norm.weight": ends.clone(),
                f"{old}enorm.weight": norm, f"{old}hnorm.weight": norm.clone(),
            }  # fmt: skip
    save_file({**weights, **(extra if heads else {})}, file, metadata={"format": "pt"})
    config = headed_config(family)
    config.dtype, config.architectures = torch.float64, [type(model).__name__]
    config.save_pretrained(folder)
    return str(folder)


def known(monkeypatch: Any) -> None:
    """Have transformers know the weights of all these heads while a test runs."""
    for family, (config, *_) in HEADED.items():
        if not hasattr(transformers, config):  # an older transformers, which makes no heads
            continue
        where = "_keys_to_ignore_on_load_unexpected"
        monkeypatch.setattr(model_class(family), where, patterns(family))


@functools.cache
def live(family: str, share: float | None = None) -> Any:
    """The model of that checkpoint; only while its weights are `known`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(family, share),
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model.generation_config.pad_token_id = 0
    return model


__all__ = ["HEADED", "checkpoint", "headed_config", "known", "live"]

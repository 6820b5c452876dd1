"""What single families of models do, and nothing but a name tells: one table.

All else about a model is read off its modules, seen in a probe or tried in small
(`requirements.py`, `probe.py`, `batch_trial.py`), whatever the model is called. An entry here goes
by a field, a flag or a class that some family in transformers has to itself. Tests ask the
installed transformers whether its models still do it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = re.compile(r"Position(al)?Embedding")
_COUNTING = ("JetMoeTopKGating", "XmodOutput")  # classes that share out a step's rows
_MULTIPLIES = re.compile(r"self\.\w+\.weight @")
_READS_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)")


@dataclass(frozen=True)
class Quirk:
    """One thing that some models do.

    `holds(model)`: whether a model does it. `models`: types that do, some of them with `config`
    only, in transformers 5.17 to 5.22. `so`: what is so. `hence`: what is done about it.
    """

    holds: Callable[[PreTrainedModel], bool]
    models: tuple[str, ...]
    so: str
    hence: str
    config: tuple[tuple[str, Any], ...] = ()


def _text(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _numbers_columns(model: PreTrainedModel) -> bool:
    if _takes(model, "position_ids") or getattr(_text(model), "rotary_value", None) is not None:
        return False
    return any(_POSITIONS.search(type(module).__name__) for module in model.modules())


def _reads_a_prefix(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "prefix_lm", False)) and _takes(model, "token_type_ids")


def _stretches_positions(model: PreTrainedModel) -> bool:
    return (getattr(_text(model), "rope_parameters", None) or {}).get("rope_type") == "longrope"


def _keeps_state(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_is_stateful", False)) and not getattr(
        _text(model), "layer_types", None
    )


def _has_its_own_cache(model: PreTrainedModel) -> bool:
    return not getattr(model, "_supports_default_dynamic_cache", lambda: True)()


def _rotates_by_length(model: PreTrainedModel) -> bool:
    rope = getattr(_text(model), "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    return any("dynamic" in str(one.get("rope_type")) for one in kinds)


def _counts_rows(model: PreTrainedModel) -> bool:
    return any(name in vars(sys.modules[type(model).__module__]) for name in _COUNTING)


def _has_experts_of_nothing(model: PreTrainedModel) -> bool:
    return bool(getattr(_text(model), "zero_expert_num", 0))


def _reads_the_name(model: PreTrainedModel) -> bool:
    if hasattr(model.config, "reorder_and_upcast_attn"):
        return bool(model.config.reorder_and_upcast_attn)
    module = sys.modules.get(type(model).__module__)
    return module is not None and bool(_READS_NAME.search(inspect.getsource(module)))


def _adds_its_bias_twice(model: PreTrainedModel) -> bool:
    return bool(getattr(_text(model), "alibi", False)) and _reads_the_name(model)


def _multiplies_by_itself(model: PreTrainedModel) -> bool:
    module = sys.modules.get(type(model).__module__)
    if module is None:
        return False
    source = inspect.getsource(module)
    return bool(_MULTIPLIES.search(source)) and "_is_quantized" not in source


NUMBERS_COLUMNS = Quirk(
    _numbers_columns,
    ("cpmant", "trocr", "bart", "marian", "pegasus"),
    "positions are embedded by column, and no position_ids are taken; RoFormer (rotary_value) "
    "rotates such a table in, so that only distances count",
    "refused: prompts of different lengths would be read wrongly together",
)
READS_A_PREFIX = Quirk(
    _reads_a_prefix,
    ("hrm_text",),
    "a prompt's tokens see one another in both directions, told by token_type_ids",
    "a prompt is read in one step, with token_type_ids of 1; the feature bidirectional_prefix",
    (("prefix_lm", True),),
)
STRETCHES_POSITIONS = Quirk(
    _stretches_positions,
    ("phi3",),
    "with longrope the positions of all tokens change once a batch grows beyond the length of "
    "pre-training, those in the cache too",
    "that length is the longest context",
    (
        (
            "rope_parameters",
            {
                "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
            },
        ),
    ),
)  # fmt: skip
KEEPS_STATE = Quirk(
    _keeps_state,
    ("recurrent_gemma", "rwkv", "xlstm"),
    "what was read is kept in modules, by _is_stateful, and no layer_types say which",
    "refused, unless its cache has layers of that kind: requests would share what was read",
)
HAS_ITS_OWN_CACHE = Quirk(
    _has_its_own_cache,
    ("minimax", "rwkv", "xlnet", "xlstm"),
    "its cache is of a class of its own, by _supports_default_dynamic_cache",
    "refused: no cache here is of that class",
)
READS_THE_NAME = Quirk(
    _reads_the_name,
    ("deepseek_v32", "falcon", "glm_moe_dsa"),
    "its code asks what the attention is called and does something else for some names: a sparse "
    "mask for 'eager' (DeepSeek-V3.2); GPT-2 asks for reorder_and_upcast_attn alone",
    "its attention is not replaced; the feature own_attention",
)

ADDS_ITS_BIAS_TWICE = Quirk(
    _adds_its_bias_twice,
    ("falcon",),
    "under the name 'eager' its ALiBi is added to scores that a mask adds it to once more; under "
    "'sdpa', which it takes where nothing is said, the mask alone has it",
    "its own attention is run under the name 'sdpa'",
    (("alibi", True),),
)

ROTATES_BY_LENGTH = Quirk(
    _rotates_by_length,
    ("llama", "mistral"),
    "with a dynamic rope the angles are made anew where the longest text of a step is longer than "
    "any before (Python compares numbers of a tensor)",
    "refused by compilers: what they trace cannot depend on numbers",
    (
        (
            "rope_parameters",
            {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
    ),
)
HAS_EXPERTS_OF_NOTHING = Quirk(
    _has_experts_of_nothing,
    ("longcat_flash",),
    "tokens may choose experts that compute nothing (zero_expert_num); Python asks which have any",
    "refused by compilers: what they trace cannot depend on numbers",
)
COUNTS_ROWS = Quirk(
    _counts_rows,
    ("jetmoe", "xmod"),
    "a step's rows are shared out in Python, by numbers that are read from a tensor",
    "refused by compilers that need shapes that are known",
)

MULTIPLIES_BY_ITSELF = Quirk(
    _multiplies_by_itself,
    ("mamba",),
    "the matrix of a linear layer (dt_proj) is multiplied with by the code around it; FalconMamba "
    "calls the layer where its config says _is_quantized",
    "refused by quantizers, which store matrices in other forms",
)

TABLE = (
    NUMBERS_COLUMNS, READS_A_PREFIX, STRETCHES_POSITIONS, KEEPS_STATE, HAS_ITS_OWN_CACHE,
    READS_THE_NAME, ADDS_ITS_BIAS_TWICE, ROTATES_BY_LENGTH, HAS_EXPERTS_OF_NOTHING, COUNTS_ROWS,
    MULTIPLIES_BY_ITSELF,
)  # fmt: skip

"""What to write instead of a word of another engine, with the value that stands beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jackfield.requests import neutral
from jackfield.requests.neutral import asks_for_nothing
from jackfield.requests.other_engines import LOADING, REQUESTS

_PARTED = "cache_salt parts a prompt from others; jackfield.load(cache_implementation='paged?"
_PARTED += "prefix_sharing=no') finds no beginnings at all"
_PREFIX = "write cache_implementation='paged?prefix_sharing=no' to turn it off"
_EAGER = "write compile='none'"

#: word of loading -> its value -> the answer, where that of the table is for another one.
_OTHERWISE: Mapping[str, Mapping[Any, str]] = {
    **{
        n: {False: _PREFIX} for n in ("enable_prefix_caching", "enable_radix_cache", "cache_prompt")
    },
    **{
        n: {False: _EAGER}
        for n in ("cuda_graphs", "use_cuda_graph", "enable_torch_compile", "torch_compile")
    },
    "enable_chunked_prefill": {
        False: "prompts are always fed beside other requests; prefill_chunk_size=N says in pieces "
        "of what size, and max_batch_tokens=N how much a step has"
    },
    "use_mmap": {False: "weights are always mapped from their files; drop it"},
    **{
        n: {True: "texts are made here, and no embeddings; drop it"}
        for n in ("embedding_only", "embedding", "embeddings")
    },
    **{
        n: {0: "write device_map='cpu'"}
        for n in ("n_gpu_layers", "gpu_layers", "num_gpu_layers", "num_gpu")
    },
}

_UNBOUND = "each text has a bound here: write max_new_tokens=512"
#: The same of a call.
_OF_A_CALL: Mapping[str, Mapping[Any, str]] = {
    **{name: {-1: _UNBOUND, -2: _UNBOUND, None: _UNBOUND} for name in neutral.BOUNDS},
    "cache_prompt": {False: _PARTED},
}

#: A word whose value may say several things: what is said -> what to write.
_WITHIN: Mapping[str, Mapping[str, str]] = {
    "structured_outputs": {
        "regex": "regex", "choice": "choices", "json": "json_schema", "grammar": "grammar",
    },
    "response_format": {"json_schema": "json_schema", "schema": "json_schema"},
}  # fmt: skip
_GUESSING = {"ngram": "write decoding='prompt_lookup'", "mtp": "write decoding='mtp'"}

#: An answer whose example is a number, a text, a list, or an object that the caller's may replace.
_NUMBER = re.compile(
    r"write (?:\w+=|\w+='\w+\?(?:memory|num_tokens|page_size|num_assistant_tokens)=)(\d[\d.]*)"
)
_PLAIN = re.compile(
    r"(?:[^;]*; )?write (?:stop|eos_token_id|regex|choices|json_schema)="
    r"('[^']*'|\[[^\]]*\]|\{[^}]*\})$"
)
#: Numbers that count something else there.
_OTHER_UNITS = frozenset({"num_gpu_blocks_override", "gpu_layers", "num_gpu"})


def is_neutral(name: object, value: Any) -> bool:
    """Whether a word of another engine has a value that asks for what is so here anyway."""
    if not isinstance(name, str):
        return False
    return (name in LOADING and asks_for_nothing(neutral.LOADING, name, value)) or (
        name in REQUESTS and asks_for_nothing(neutral.REQUESTS, name, value)
    )


def of_loading(name: str, value: Any) -> str:
    """What to write instead of a keyword of loading that is in `LOADING`."""
    method = value.get("method") if isinstance(value, Mapping) else None
    if name == "speculative_config" and method in _GUESSING:
        return _GUESSING[method]
    return _with_value(name, _chosen(_OTHERWISE, LOADING, name, value), value)


def of_request(name: str, value: Any) -> str:
    """What to write instead of a setting of a call that is in `REQUESTS`."""
    within = _WITHIN.get("structured_outputs" if name == "guided_decoding" else name, {})
    if isinstance(value, Mapping):
        for theirs, ours in within.items():
            if (said := value.get(theirs)) is not None:
                if theirs == "json_schema" and isinstance(said, Mapping):
                    said = said.get("schema", said)
                return f"write {ours}={_shown(said)}"
        if within and value.get("type") == "json_object":
            return "write json_schema={'type': 'object'}"
        if name == "logit_bias" and (biases := _biases(value)):
            return f"write sequence_bias={_shown(biases)}"
    return _with_value(name, _chosen(_OF_A_CALL, REQUESTS, name, value), value)


def _biases(value: Mapping[Any, Any]) -> list[list[Any]]:
    """As `sequence_bias` has them; none where one of them is no number of a token."""
    pairs = [(str(token), bias) for token, bias in value.items()]
    if not all(token.isdecimal() and type(bias) in (int, float) for token, bias in pairs):
        return []
    return [[[int(token)], float(bias)] for token, bias in pairs]


def _chosen(
    special: Mapping[str, Mapping[Any, str]], table: Mapping[str, str], name: str, value: Any
) -> str:
    for known, answer in special.get(name, {}).items():
        if type(value) is type(known) and value == known:
            return answer
    return table[name]


def _with_value(name: str, answer: str, value: Any) -> str:
    """The answer, its example being the caller's value where that is of its kind."""
    if name in _OTHER_UNITS:
        return answer
    if type(value) in (int, float) and (found := _NUMBER.match(answer)) is not None:
        whole = "." not in found[1]
        if (type(value) is int or not whole) and value >= (0 if name in _FROM_ZERO else 1e-9):
            return answer[: found.start(1)] + repr(value) + answer[found.end(1) :]
    if (found := _PLAIN.match(answer)) is not None:
        if found[1][0] == "[" and type(value) in (int, str) and name != "guided_choice":
            value = [value]
        if type(value) in _KINDS[found[1][0]] and value and len(repr(value)) < 60:
            return answer[: found.start(1)] + repr(value) + answer[found.end(1) :]
    return answer


_FROM_ZERO = frozenset({"temp", "random_seed", "sampling_seed"})
_KINDS: Mapping[str, tuple[type, ...]] = {"'": (str,), "[": (list,), "{": (dict,)}


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) < 60 else "…"

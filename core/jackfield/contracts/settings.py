"""What a request asked for, checked and resolved, as every backend reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple


class Structure(NamedTuple):
    """What a request's text must look like: its kind ("choices", "grammar",
    "json_schema" or "regex") and its text (JSON of a schema)."""

    kind: str
    source: str


class BeamSettings(NamedTuple):
    """What a request asks of a search, by transformers' names; None: as its options say."""

    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None


class DraftSettings(NamedTuple):
    """What a request asks of drafts, by transformers' names; None: as its options say."""

    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None


class Settings(NamedTuple):
    """One request's settings, checked and resolved. Biases come before anything else.

    `sequence_bias` maps token-id tuples to what is added to the last one's logit when the others
    precede it; bad words and suppressed tokens are in it with -inf. `logits_processor` are
    functions of (token ids `[1, length]`, scores `[1, vocab]`), called after the penalties;
    `stopping_criteria` are functions of (token ids `[1, length]` on the CPU, None) that say after
    each token whether it was the last.
    A higher `priority` goes first; `deadline` is in seconds from submission; only requests with an
    equal `cache_salt` share cached prefixes. `decoding` names one of the engine's strategies,
    `drafts` and `beams` are what it is asked for. `structure` says what the text must look like.
    A tuple, since backends read it: nothing changes one, not even `object.__setattr__`.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    sequence_bias: Mapping[tuple[int, ...], float] = MappingProxyType({})
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    logits_processor: tuple[Callable[..., Any], ...] = ()
    stopping_criteria: tuple[Callable[..., Any], ...] = ()
    num_return_sequences: int = 1
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    decoding: str = ""
    drafts: DraftSettings = DraftSettings()
    beams: BeamSettings = BeamSettings()
    structure: Structure | None = None

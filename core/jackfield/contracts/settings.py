"""What a request asked for, checked and resolved, as every backend reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple


class Structure(NamedTuple):
    """What a request's text must look like.

    Attributes:
        kind: "choices", "grammar", "json_schema" or "regex".
        source: Its text; JSON of choices and of a schema.
    """

    kind: str
    source: str


class BeamSettings(NamedTuple):
    """What a request asks of a search, by transformers' names; None: as its options say.

    Attributes:
        num_beams: How many texts go on at once.
        length_penalty: The power of a text's length by which its score is divided.
        early_stopping: Whether a search ends when it has as many texts as beams; "never": only when
            no beam can become better.
        num_beam_groups: How many searches beams are divided among.
        diversity_penalty: What a token costs for each beam of another group that has it.
    """

    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_beam_groups: int | None = None
    diversity_penalty: float | None = None


class DraftSettings(NamedTuple):
    """What a request asks of drafts, by transformers' names; None: as its options say.

    Attributes:
        prompt_lookup_num_tokens: How many drafts at most are copied out of the text itself.
        max_matching_ngram_size: How many last tokens are looked for there, at most.
        num_assistant_tokens: How many drafts a draft model makes.
        num_assistant_tokens_schedule: "constant" or "heuristic": whether that number is adapted.
        assistant_confidence_threshold: A draft below this probability is the last one.
    """

    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None


class Settings(NamedTuple):
    """One request's settings, checked and resolved, by transformers' names where it has one.

    A tuple, since backends read it: nothing changes one, not even `object.__setattr__`.

    Attributes:
        max_new_tokens: How many tokens it may get, at least 1.
        min_new_tokens: No EOS token comes before so many.
        do_sample: Whether tokens are drawn; otherwise the likeliest is taken.
        temperature: Divides the scores where tokens are drawn.
        top_k: How many of the likeliest tokens stay; 0: all.
        top_p: The least share of probability that the likeliest tokens which stay have together.
        min_p: The least share of the likeliest token's probability that a token which stays has.
        top_h: The most of the entropy that the likeliest tokens which stay have together; 0: any.
        typical_p: The least share of probability that the tokens which stay have together, those
            first whose information is closest to the entropy; 1: all.
        epsilon_cutoff: The least probability of a token which stays, unless it is the likeliest.
        eta_cutoff: The same, lower where the entropy is high.
        repetition_penalty: Divides positive scores, and multiplies negative ones, of tokens that
            are in the prompt or the new text.
        presence_penalty: Is taken off the scores of tokens that are among the new ones.
        frequency_penalty: Is taken off as often as they are there.
        sequence_bias: Token ids, the last of which gets what they map to added to its score when
            the others precede it. Bad words and suppressed tokens are in it with -inf. Comes before
            anything else but guidance.
        eos_token_ids: Tokens that end a text.
        stop_strings: Strings that end it.
        seed: The key of its random numbers.
        logprobs: Of how many of the likeliest tokens log-probabilities are told; None: of none.
        output_logits: Whether the completion has the model's logits of each new token.
        output_scores: Whether it has the scores that each was chosen by.
        output_hidden_states: Whether it has what each layer gives.
        output_attentions: Whether it has how much each token looks at the others, by layer.
        logits_processor: Functions of (token ids `[1, length]`, scores `[1, vocab]`), called after
            the penalties.
        guidance_scale: How far scores are led away from those behind the request's negative prompt,
            before anything else; 1: it has none.
        watermark: A function like those of `logits_processor`, called after all else: temperature,
            and what narrows the choice. Each text has its own.
        stopping_criteria: Functions of (token ids `[1, length]` on the CPU, None) that say after
            each token whether it was the last.
        num_return_sequences: How many texts it gets.
        priority: A higher one goes first.
        deadline: In seconds from the call, before the prompt is read; None: it may take any time.
        cache_salt: Only requests with an equal one share cached prefixes.
        adapter: The one of the engine's adapters that computes it; None: the weights alone. What it
            caches has a `cache_salt` of its own.
        decoding: The name of the engine's strategy that it runs with.
        drafts: What that is asked for.
        beams: What a search is asked for.
        structure: What the text must look like; None: anything.
        skip_special_tokens: Whether the text leaves out special tokens; otherwise it leaves out
            the EOS that ends it.
        renormalize_logits: Whether the scores that are returned, and by which beams are compared,
            are made log-probabilities after all else. It changes no draw.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_h: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    sequence_bias: Mapping[tuple[int, ...], float] = MappingProxyType({})
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    output_logits: bool = False
    output_scores: bool = False
    output_hidden_states: bool = False
    output_attentions: bool = False
    logits_processor: tuple[Callable[..., Any], ...] = ()
    guidance_scale: float = 1.0
    watermark: Callable[..., Any] | None = None
    stopping_criteria: tuple[Callable[..., Any], ...] = ()
    num_return_sequences: int = 1
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    adapter: str | None = None
    decoding: str = ""
    drafts: DraftSettings = DraftSettings()
    beams: BeamSettings = BeamSettings()
    structure: Structure | None = None
    skip_special_tokens: bool = True
    renormalize_logits: bool = False

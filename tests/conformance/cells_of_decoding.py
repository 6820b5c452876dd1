"""Every decoding, free and structured, with every cache on every family.

A cell is refused by a plan, with the reason, or it gives the tokens of plain `generate`, which has
no drafts and runs one prompt by itself: for four prompts one by one, for the four as a batch, and
with prompts in chunks of 7; each with EOS tokens that texts do come to, and with none, neither of
the request nor of the model nor of the tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from beams import ENDS
from cells import LOSSY, SPELLED, Cell, Mode, judge, model_of, names
from drafting import ASSISTED, LOOKUP, draft_of, repetitive
from families import VOCAB, WINDOW, build, character_tokenizer

import jackfield

if TYPE_CHECKING:
    import transformers

LENGTHS = (WINDOW - 2, WINDOW + 1, 3 * WINDOW, WINDOW)
COUNT = 16
REGEX = "[ -k]{3,6}[x-z]{0,9}"  # first what a model would say anyway, then what ends soon
END = VOCAB - 1  # "<end>", the tokenizer's own


class Way(NamedTuple):
    """A row: a selection of a decoding, with what is asked of it."""

    decoding: str
    another_tokenizer: bool = False  # of the draft model
    num_beams: int | None = None
    structured: bool = False

    @property
    def drafts(self) -> bool:
        return self.decoding in (LOOKUP, ASSISTED)


FREE = {
    "sample": Way("sample"),
    "prompt_lookup": Way(LOOKUP),
    "assisted": Way(ASSISTED),
    "assisted, another tokenizer": Way(ASSISTED, another_tokenizer=True),
    "beam": Way("beam", num_beams=3),
}
WAYS = {
    **FREE,
    **{f"{name}, structured": way._replace(structured=True) for name, way in FREE.items()},
}


def texts() -> list[list[int]]:
    """Prompts that repeat themselves, from window - 2 to 3 × window tokens."""
    return [text[:n] for text, n in zip(repetitive(len(LENGTHS), LENGTHS[2]), LENGTHS, strict=True)]


def cells(family: str) -> list[Cell]:
    return [
        run(family, row, cache)
        for row, way in WAYS.items()
        for cache in names("cache")
        if cache not in LOSSY or way.decoding != "sample"
    ]


def run(family: str, row: str, cache: str) -> Cell:
    way = WAYS[row]

    def plan(dtype: torch.dtype) -> None:
        found = jackfield.plan(model_of(family, dtype), **chosen(family, way, cache))
        assert found["cache"].registered.name == cache
        assert found["decoding"].registered.name == way.decoding.partition("?")[0]

    return judge(family, row, cache, plan, lambda dtype: modes(family, way, cache, dtype))


def chosen(family: str, way: Way, cache: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "decoding": way.decoding,
        "cache_implementation": SPELLED.get(cache, cache),
    }
    if way.another_tokenizer:
        arguments["assistant_model"] = backwards_of(family)
    elif way.decoding == ASSISTED:
        arguments["assistant_model"] = draft_of(family)
    return arguments


@functools.cache
def backwards_of(family: str) -> transformers.PreTrainedModel:
    """The draft model of a family, made to read and to say a vocabulary that is turned round."""
    model = build(family)
    model.load_state_dict(draft_of(family).state_dict())
    with torch.no_grad():
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.weight.copy_(part.weight.flip(0))
    return model


def tokenizer(*, ends: bool, backwards: bool = False) -> Any:
    found = character_tokenizer(backwards=backwards)
    if not ends:
        found.eos_token = None
    return found


def modes(family: str, way: Way, cache: str, dtype: torch.dtype) -> Iterable[Mode]:
    arguments, model = chosen(family, way, cache), model_of(family, dtype)
    whole = jackfield.plan(model, **arguments).requirements.whole_prompt
    chunks = (None,) if whole else (None, 7)
    for ends in (True, False):
        end = "EOS" if ends else "no EOS"
        wanted = said(family, dtype, ends, way.structured, way.num_beams)
        if way.another_tokenizer:
            arguments["assistant"] = {"tokenizer": tokenizer(ends=ends, backwards=True)}
        for chunk in chunks:
            with jackfield.load(
                model, tokenizer=tokenizer(ends=ends), prefill_chunk_size=chunk, **arguments
            ) as engine:
                together = tokens(engine, texts(), way, ends)
                alone = [tokens(engine, [text], way, ends)[0] for text in texts()]
                figures = engine.report().speculation
            yield f"batch 4, chunks of {chunk or 'all'}, {end}", together == wanted
            yield f"batch 1, chunks of {chunk or 'all'}, {end}", alone == wanted
            yield f"drafts, {end}", way.drafts == bool(figures and figures.proposed)


def tokens(
    engine: jackfield.Engine, prompts: list[list[int]], way: Way, ends: bool
) -> list[list[int]]:
    asked: dict[str, Any] = {
        "eos_token_id": list(_ends(ends, way.structured)),
        "num_beams": way.num_beams,
        "regex": REGEX if way.structured else None,
    }
    return [c.token_ids for c in engine.generate(prompts, max_new_tokens=COUNT, **asked)]


def _ends(ends: bool, structured: bool) -> tuple[int, ...]:
    return ((END,) if structured else ENDS) if ends else ()


@functools.cache
def said(
    family: str, dtype: torch.dtype, ends: bool, structured: bool, num_beams: int | None
) -> list[list[int]]:
    """What transformers says to each of the prompts, told by llguidance itself what may follow."""
    model, stops = build(family, dtype), _ends(ends, structured)
    return [_said(model, text, stops, structured, num_beams) for text in texts()]


def _said(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    ends: tuple[int, ...],
    structured: bool,
    num_beams: int | None,
) -> list[int]:
    ids, n = torch.tensor([prompt]), len(prompt)
    asked: dict[str, Any] = {"num_beams": num_beams or 1, "eos_token_id": list(ends) or None}
    if getattr(model.config, "prefix_lm", False):  # the whole prompt is the prefix
        asked["token_type_ids"] = torch.ones_like(ids)
    if structured:
        asked["prefix_allowed_tokens_fn"] = lambda _, row: _allowed(row[n:].tolist(), ends)
        asked["stopping_criteria"] = [
            lambda rows, _: torch.tensor([_length(row[n:].tolist()) > 0 for row in rows])
        ]
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        max_new_tokens=COUNT, **asked,
    )  # fmt: skip
    new = output[0, n:].tolist()
    stop = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
    return new[: (_length(new) or stop) if structured else stop]


@functools.cache
def _matcher() -> Any:
    import llguidance
    from llguidance.hf import from_tokenizer

    vocabulary = from_tokenizer(tokenizer(ends=True), n_vocab=VOCAB, eos_token=[END])
    return llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_regex(REGEX))


def _length(text: list[int]) -> int:
    """After how many tokens nothing more can follow; 0: something can."""
    matcher = _matcher().deep_copy()
    for count, token in enumerate(text, 1):
        matcher.consume_token(token)
        if matcher.is_stopped():
            return count
    return 0


def _allowed(text: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens that may follow; where none can, any one, since the text ends there."""
    matcher = _matcher().deep_copy()
    for token in text:
        matcher.consume_token(token)
    bits = matcher.compute_bitmask()
    every = range(VOCAB) if ends else range(END)
    return [token for token in every if bits[token // 8] >> token % 8 & 1] or [0]

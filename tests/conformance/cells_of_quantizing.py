"""Every quantizer with every cache on every family.

A cell is refused by a plan, with the reason, or the quantized model says what it says itself with
cache `dynamic`, attention `sdpa` (`eager` where that one is refused), without drafts, one prompt by
itself: again alone, in a ragged batch, and with drafts where the cache can take them back.

Activations are float32 or bfloat16 here, and quantizers round them once more, so another shape of
a step moves scores a little. How far is measured: by the log-probabilities of the same tokens when
the same model reads the text in one piece (prefix models: when attention `eager` writes it again).
Texts may part only where the two tokens were closer.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from cells import LOSSY, SLOW, SPELLED, Cell, names
from drafting import LOOKUP
from families import VOCAB, WINDOW, build, prompts

import jackfield
from jackfield.errors import JackfieldError, PlanError

LENGTHS = (WINDOW - 2, WINDOW + 1, 3 * WINDOW, WINDOW)
COUNT = 12
FINE = 1e-3  # scores that move by less were not rounded but at the end of a float32
MORE = ("torchao?type=int8-dynamic",)

_folders: list[tempfile.TemporaryDirectory[str]] = []

#: Tokens, and the log-probability of every token at each place.
Said = tuple[list[int], list[dict[int, float]]]


class Reference(NamedTuple):
    """What a quantized model says, and how far apart two of its scores must be to be sure."""

    said: list[Said]
    noise: float


@functools.cache
def folder(family: str) -> str:
    """A checkpoint, which lives as long as the process.

    Every expert is asked for every token: which of two that are equally good is asked would be
    decided by last bits, and what it then says is something else altogether.
    """
    made = tempfile.TemporaryDirectory()
    _folders.append(made)
    model = build(family, torch.float32)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if count := getattr(model.config, name, None):
            model.config.num_experts_per_tok = count
    model.save_pretrained(made.name)
    return made.name


def rows() -> list[str]:
    """Selections, under which the page has them."""
    return sorted({*names("quantizer"), *MORE} - set(SLOW))


def cells(family: str) -> list[Cell]:
    caches = [cache for cache in names("cache") if cache not in LOSSY]
    return [run(family, row, cache) for row in rows() for cache in caches]


def run(family: str, row: str, cache: str) -> Cell:
    chosen = {
        "quantization": SPELLED.get(row, row),
        "cache_implementation": SPELLED.get(cache, cache),
    }
    try:
        plan = jackfield.plan(folder(family), **chosen)
    except JackfieldError as refused:
        return Cell(family, row, cache, "refused", str(refused))
    assert plan["cache"].registered.name == cache
    try:
        reference = reference_of(family, chosen["quantization"])
        parted = [(mode, away) for mode, away in modes(family, chosen, reference) if away]
    except JackfieldError as failed:  # what was not refused must run
        return Cell(family, row, cache, "wrong", str(failed))
    wrong = [f"{mode} ({away:.3f})" for mode, away in parted if away > reference.noise]
    if wrong:
        note = f"{', '.join(wrong)}, sure by {reference.noise:.3f}"
        return Cell(family, row, cache, "wrong", note)
    return Cell(family, row, cache, "equal", "same" if reference.noise < FINE else "rounded")


def modes(family: str, chosen: dict[str, str], reference: Reference) -> Iterator[tuple[str, float]]:
    """How sure the reference was of a token at which a mode parts from it; 0: none does."""
    try:
        jackfield.plan(folder(family), decoding=LOOKUP, **chosen)
        offered = {"sample": "sample", "lookup": LOOKUP}
    except PlanError:
        offered = {"sample": "sample"}
    with jackfield.load(folder(family), decoding=offered, **chosen) as engine:
        alone = [said(engine, [prompt])[0] for prompt in prompts(LENGTHS)]
        yield "single", away(alone, reference)
        for name in offered:
            yield f"ragged, {name}", away(said(engine, prompts(LENGTHS), name), reference)


def said(engine: jackfield.Engine, texts: list[list[int]], decoding: str = "sample") -> list[Said]:
    found = engine.generate(
        texts, max_new_tokens=COUNT, eos_token_id=[], logprobs=VOCAB, decoding=decoding
    )
    return [(c.token_ids, [dict(place.top) for place in c.logprobs]) for c in found]


def away(found: Iterable[Said], reference: Reference) -> float:
    """By how much the reference preferred its token to the one where a text parts from its own."""
    most = 0.0
    for (tokens, _), (wanted, scores) in zip(found, reference.said, strict=True):
        for token, right, score in zip(tokens, wanted, scores, strict=True):
            if token != right:
                most = max(most, score[right] - score[token])
                break
    return most


def moved(found: Said, reference: Said) -> float:
    """By how much a score differs, up to where the texts part."""
    most = 0.0
    for token, mine, wanted, theirs in zip(*found, *reference, strict=True):
        most = max(most, *(abs(score - theirs[other]) for other, score in mine.items()))
        if token != wanted:
            break
    return most


def noise_of_attention(family: str, quantization: str, found: list[Said]) -> float:
    """By how much another attention moves scores.

    What a prefix model said cannot be read again in one piece: it would be read as a prompt.
    """
    with jackfield.load(
        folder(family), quantization=quantization, attn_implementation="eager",
        cache_implementation="dynamic",
    ) as engine:  # fmt: skip
        rows = [said(engine, [prompt])[0] for prompt in prompts(LENGTHS)]
    return max(map(moved, rows, found))


@functools.cache
def reference_of(family: str, quantization: str) -> Reference:
    chosen: dict[str, Any] = {
        "attn_implementation": ["sdpa", "eager"],
        "cache_implementation": "dynamic",
        "decoding": "sample",
    }
    with jackfield.load(folder(family), quantization=quantization, **chosen) as engine:
        found = [said(engine, [prompt])[0] for prompt in prompts(LENGTHS)]
        noise = 0.0
        if "bidirectional_prefix" in engine.plan.requirements.features:
            return Reference(found, 2 * noise_of_attention(family, quantization, found))
        for prompt, (tokens, scores) in zip(prompts(LENGTHS), found, strict=True):
            for place in range(1, COUNT, 2):
                read = [*prompt, *tokens[:place]]
                (again,) = engine.generate(read, max_new_tokens=1, eos_token_id=[], logprobs=VOCAB)
                for token, score in again.logprobs[0].top:
                    noise = max(noise, abs(score - scores[place][token]))
    return Reference(found, 2 * noise)  # two tokens may move towards each other

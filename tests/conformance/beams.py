"""Beam search by plain transformers, one prompt by itself, and by engines that have it."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from families import build, prompts

import jackfield
from jackfield.sequences import Sequence

if TYPE_CHECKING:
    import transformers

COUNT = 12
LENGTHS = (5, 9, 17, 3)
#: EOS tokens that random texts of tiny models do come to.
ENDS = tuple(range(0, 120, 11))
BOTH = {"sample": "sample", "beam": "beam"}

#: A text, and its score.
Found = tuple[list[int], float]

model_of = functools.cache(build)
plain = functools.cache(build)  # runs in no engine


def search(model: transformers.PreTrainedModel, prompt: Seq[int], **settings: Any) -> list[Found]:
    """What transformers finds, the texts cut behind their EOS token, and what it ranks them by."""
    ids = torch.tensor([list(prompt)])
    ends = settings.get("eos_token_id") or ()
    settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    if getattr(model.config, "prefix_lm", False):  # the whole prompt is the prefix
        settings["token_type_ids"] = torch.ones_like(ids)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **{"max_new_tokens": COUNT, "do_sample": False, **settings},
    )
    found = []
    pairs = zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True)
    for row, score in pairs:
        new = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        found.append((new[:end], score))
    return found


@functools.cache
def _reference(family: str, length: int, settings: frozenset[tuple[str, Any]]) -> list[Found]:
    number = LENGTHS.index(length)
    return search(plain(family), prompts(LENGTHS)[number], **dict(settings))


def references(family: str, **settings: Any) -> list[list[Found]]:
    """For each of the prompts of `LENGTHS`; `settings` can be hashed."""
    key = frozenset(settings.items())
    return [_reference(family, length, key) for length in LENGTHS]


def texts(completions: Seq[jackfield.Completion] | Seq[Sequence]) -> list[Found]:
    """Texts and scores of completions, or of sequences that have ended."""
    found = []
    for one in completions:
        assert one.score is not None
        new = one.new_tokens if isinstance(one, Sequence) else one.token_ids
        found.append((new, one.score))
    return found


def same(found: Seq[Found], expected: Seq[Found], close: float = 1e-5) -> None:
    """The same texts, with scores that are the same but for the last bits of a float32."""
    assert [text for text, _ in found] == [text for text, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert abs(one - other) <= close * max(1.0, abs(other))

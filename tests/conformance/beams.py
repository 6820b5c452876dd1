"""Beam search by plain transformers and by the paper, one prompt by itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import build, prompts

import jackfield
from jackfield.contracts import Sequence
from jackfield.contracts.counter_rng import gumbel

if TYPE_CHECKING:
    import transformers

COUNT = 12
LENGTHS = (5, 9, 17, 3)
#: EOS tokens that random texts of tiny models do come to.
ENDS = tuple(range(0, 120, 11))
CPU = torch.device("cpu")
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


def drawn(family: str, prompt: Seq[int], seed: int, **asked: Any) -> list[Found]:
    """What transformers' beam search says when it draws with our numbers."""
    position = itertools.count(len(prompt))

    def multinomial(chances: torch.Tensor, num_samples: int) -> torch.Tensor:
        noise = gumbel(seed, next(position), chances.shape[1], CPU)
        return (chances[0].double().log() + noise).topk(num_samples).indices[None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        return search(plain(family), prompt, **{"top_k": 0, **asked})


def diverse(
    family: str,
    prompt: list[int],
    num_beams: int,
    num_beam_groups: int,
    diversity_penalty: float,
    length_penalty: float = 1.0,
    eos_token_id: tuple[int, ...] = (),
    num_return_sequences: int = 1,
    max_new_tokens: int = COUNT,
) -> list[Found]:
    """Vijayakumar et al. 2016, algorithm 1, with Hamming diversity; no cache, text by text.

    A group is a beam search of its own, which ends as transformers' does. What a token costs stays
    in the score, and a text that has ended costs the later groups nothing.
    """
    size, model = num_beams // num_beam_groups, plain(family)
    running: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(num_beam_groups)]
    found: list[list[tuple[float, list[int]]]] = [[] for _ in range(num_beam_groups)]
    for length in range(1, max_new_tokens + 1):
        taken: list[int] = []
        for own, ended in zip(running, found, strict=True):
            possible = []
            for score, text in own:
                logits = model(torch.tensor([prompt + text])).logits[0, -1]
                for token, chance in enumerate(logits.float().log_softmax(-1).tolist()):
                    cost = diversity_penalty * taken.count(token)
                    possible.append((score + chance - cost, [*text, token]))
            possible.sort(key=lambda one: -one[0])
            over = [text[-1] in eos_token_id or length == max_new_tokens for _, text in possible]
            ended += [(s / length**length_penalty, t) for (s, t), end in
                      zip(possible[:size], over, strict=False) if end]  # fmt: skip
            ended.sort(key=lambda one: -one[0])
            del ended[size:]
            looked_at = max(2, 1 + len(eos_token_id)) * size
            pairs = zip(possible[:looked_at], over, strict=False)
            own[:] = [one for one, end in pairs if not end][:size]
            best = own[0][0] / length**length_penalty if own else 0.0
            if len(ended) == size and own and best <= ended[-1][0]:
                own.clear()
            taken += [text[-1] for _, text in own]
    every = sorted((one for ended in found for one in ended), key=lambda one: -one[0])
    return [(text, score) for score, text in every[:num_return_sequences]]


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


def assert_same(found: Seq[Found], expected: Seq[Found], close: float = 1e-5) -> None:
    """The same texts, with scores that are the same but for the last bits of a float32."""
    assert [text for text, _ in found] == [text for text, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert abs(one - other) <= close * max(1.0, abs(other))

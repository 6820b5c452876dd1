"""`output_logits` and `output_scores`: what `generate` returns, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, prompts

import jackfield
from jackfield.errors import SettingsError

PROMPTS = prompts((5, 13, 9))
NEW = 9
BOTH = {"output_logits": True, "output_scores": True}
ASKED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "suppress_tokens": [5, 6]},
    {"repetition_penalty": 1.4, "renormalize_logits": True},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": 7},
    {"logits_processor": [lambda ids, scores: scores.flip(-1)]},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def right(model: Any, prompt: list[int], **asked: Any) -> Any:
    ids = torch.tensor([prompt])
    own = {"do_sample": False, **asked}
    if "logits_processor" in own:
        from transformers import LogitsProcessorList

        own["logits_processor"] = LogitsProcessorList(own["logits_processor"])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
        return_dict_in_generate=True, **BOTH, **own,
    )  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"cache_implementation": "paged"},
        {"cache_implementation": "dynamic"},
        {"decoding": "prompt_lookup"},
        {"max_batch_size": 2, "max_batch_tokens": 8},
    ],
    ids=str,
)
def test_they_are_those_of_generate(model: Any, more: dict[str, Any]) -> None:
    pairs = [(prompt, asked) for prompt in PROMPTS for asked in ASKED]
    beside: list[tuple[list[int], dict[str, Any]]] = [(PROMPTS[0], {"temperature": 1.0})]
    with jackfield.load(model, **more) as engine:
        found = engine.generate(
            [prompt for prompt, _ in pairs + beside],
            settings=[{**BOTH, **asked} for _, asked in pairs] + [beside[0][1]],
            max_new_tokens=NEW,
        )
    assert found[-1].logits is None
    assert found[-1].scores is None
    for (prompt, asked), one in zip(pairs, found[:-1], strict=True):
        due = right(model, prompt, **asked)
        assert one.token_ids == due.sequences[0, len(prompt) :].tolist()
        for name in ("logits", "scores"):
            mine, theirs = getattr(one, name), torch.cat(getattr(due, name)).float()
            assert mine.dtype == torch.float32
            assert mine.shape == (len(one.token_ids), model.config.vocab_size)
            torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5)


def test_scores_of_drawn_tokens_are_what_they_are_drawn_from(model: Any) -> None:
    shape = {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "typical_p": 0.8}
    with jackfield.load(model) as engine:
        for seed in range(3):
            (one,) = engine.generate(PROMPTS[0], max_new_tokens=NEW, seed=seed, **BOTH, **shape)
            assert one.scores is not None
            assert one.logits is not None
            config = model.generation_config.__class__(do_sample=True, **shape)
            chain = model._get_logits_processor(config, input_ids_seq_length=5, device="cpu")
            for logits, scores, token in zip(one.logits, one.scores, one.token_ids, strict=True):
                due = chain(torch.tensor([PROMPTS[0]]), logits[None].clone())[0]
                torch.testing.assert_close(scores, due, rtol=1e-4, atol=1e-5)
                assert scores[token] > -torch.inf


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 1.0, 2.0])
def test_scores_are_logits_by_temperature_in_any_company(model: Any, temperature: float) -> None:
    beside = [{"temperature": heat} for heat in (1.0, 0.5, 3.0)]
    asked = {**BOTH, "temperature": temperature}
    with jackfield.load(model) as engine:
        alone = engine.generate(PROMPTS[0], max_new_tokens=3, seed=1, **asked)
        found = engine.generate(
            [PROMPTS[0]] * 4, settings=[*beside, asked], max_new_tokens=3, seed=1
        )
    for one in (*alone, found[-1]):
        assert one.logits is not None
        assert one.scores is not None
        torch.testing.assert_close(one.scores, one.logits / (temperature or 1.0))


def test_one_of_them_and_none(model: Any) -> None:
    with jackfield.load(model) as engine:
        found = engine.generate(
            [PROMPTS[0]] * 3, max_new_tokens=3,
            settings=[{"output_logits": True}, {"output_scores": True}, {"output_scores": False}],
        )  # fmt: skip
        assert [(c.logits is None, c.scores is None) for c in found] == [
            (False, True), (True, False), (True, True),
        ]  # fmt: skip
        asked = {"max_new_tokens": 3, "num_return_sequences": 2, "temperature": 1.0}
        several = engine.generate(PROMPTS[0], output_logits=True, **asked)
        assert [len(c.logits) for c in several if c.logits is not None] == [3, 3]
        *_, last = engine.stream(PROMPTS[0], max_new_tokens=3, output_scores=True)
        assert last.completion is not None
        assert last.completion.scores is not None
        stored = last.completion.to_dict()["scores"]
        assert torch.tensor(stored).shape == last.completion.scores.shape


def test_a_stop_ends_them_with_the_tokens(model: Any) -> None:
    """Also where drafts behind it were right."""
    free = right(model, PROMPTS[1]).sequences[0, len(PROMPTS[1]) :].tolist()
    for end in range(1, NEW):
        if free[end] in free[:end]:
            continue
        with jackfield.load(model, decoding="prompt_lookup") as engine:
            (one,) = engine.generate(PROMPTS[1], max_new_tokens=NEW, eos_token_id=free[end], **BOTH)
        assert one.token_ids == free[: end + 1]
        assert one.logits is not None
        assert one.scores is not None
        assert len(one.logits) == len(one.scores) == end + 1


def test_structures_forbid_in_scores_and_not_in_logits() -> None:
    with jackfield.load("demo") as engine:
        (one,) = engine.generate("Say", choices=["yes", "no"], max_new_tokens=8, **BOTH)
    assert one.logits is not None
    assert one.scores is not None
    assert one.logits.isfinite().all()
    assert (one.scores == -torch.inf).any(-1).all()
    assert one.scores.argmax(-1).tolist() == one.token_ids
    assert None in one.to_dict()["scores"][0]


def test_odd_values_and_beams(model: Any) -> None:
    with jackfield.load(model, decoding="beam") as engine:
        for name in BOTH:
            with pytest.raises(SettingsError, match=name):
                engine.generate(PROMPTS[0], num_beams=2, **{name: True})
    with jackfield.load(model) as engine:
        for name in BOTH:
            with pytest.raises(SettingsError, match=name):
                engine.generate(PROMPTS[0], **{name: 1})

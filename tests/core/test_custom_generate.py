"""``generate(custom_generate=jackfield.decoding("plugin:NAME"))``: the same tokens, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, MaxTimeCriteria
from transformers.generation import LogitsProcessor, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.errors import JackfieldError

TEXTS = ["Copy: red green blue red green blue", "Sort these numbers: 4 1 9"]
STRATEGIES = {
    "sample": {},
    "prompt_lookup": {},
    "assisted": {"assistant_model": "demo-draft"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float64)


@pytest.fixture(scope="module")
def inputs() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH, padding_side="left")
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.3, "min_new_tokens": 8}, {"suppress_tokens": [5, 70, 71]}],
    ids=["plain", "penalty", "suppressed"],
)
def test_greedy_tokens_are_those_of_generate(
    name: str, settings: dict[str, Any], model: Any, inputs: Any
) -> None:
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False, **settings)
    own = jackfield.decoding(f"plugin:{name}", **STRATEGIES[name])
    found = model.generate(
        **inputs, max_new_tokens=24, do_sample=False, custom_generate=own, **settings
    )
    assert torch.equal(found, expected)
    assert model.config._attn_implementation == "sdpa"


class Only(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = torch.full_like(scores, -float("inf"))
        forbidden[:, self.token] = 0
        return forbidden


def test_what_a_caller_adds_is_applied(model: Any, inputs: Any) -> None:
    own = jackfield.decoding("prompt_lookup")
    found = model.generate(
        **inputs,
        max_new_tokens=6,
        custom_generate=own,
        logits_processor=LogitsProcessorList([Only(70)]),
    )
    assert (found[:, inputs["input_ids"].shape[1] :] == 70).all()


def test_the_seed_is_torchs(model: Any, inputs: Any) -> None:
    def sampled(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        own = jackfield.decoding("prompt_lookup")
        return model.generate(  # type: ignore[no-any-return]
            **inputs, max_new_tokens=12, do_sample=True, temperature=3.0, top_k=0,
            num_return_sequences=2, custom_generate=own,
        )  # fmt: skip

    assert torch.equal(sampled(1), sampled(1))
    assert sampled(1).shape[0] == 4
    assert not torch.equal(sampled(1)[:, -12:], sampled(2)[:, -12:])


def test_an_installed_attention_stays(inputs: Any) -> None:
    jackfield.install()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            MODEL_PATH, attn_implementation="plugin:sdpa?kernel=math", dtype=torch.float64
        )
        key = model.config._attn_implementation
        own = jackfield.decoding("sample")
        found = model.generate(**inputs, max_new_tokens=5, do_sample=False, custom_generate=own)
        assert model.config._attn_implementation == key
        assert torch.equal(found, model.generate(**inputs, max_new_tokens=5, do_sample=False))
    finally:
        jackfield.uninstall()


def test_processors_that_count_padding_and_criteria_of_a_callers_own(
    model: Any, inputs: Any
) -> None:
    assert (inputs["attention_mask"] == 0).any()
    width = inputs["input_ids"].shape[1]
    own = jackfield.decoding("prompt_lookup")
    for asked in (
        {"min_new_tokens": 12},
        {"begin_suppress_tokens": [22, 70]},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(width + 4)])},
        {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria([70, 71, 20])])},
    ):
        expected = model.generate(**inputs, max_new_tokens=16, do_sample=False, **asked)
        found = model.generate(
            **inputs, max_new_tokens=16, do_sample=False, custom_generate=own, **asked
        )
        assert torch.equal(found, expected), asked


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [70]}, "PrefixConstrained"),
        ({"num_beams": 2}, "num_beams=2"),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "num_beams=4, num_beam_groups=2, diversity_penalty=0.5",
        ),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9)])}, "MaxTimeCriteria"),
    ],
)
def test_what_would_be_lost_is_refused(
    asked: dict[str, Any], words: str, model: Any, inputs: Any
) -> None:
    with pytest.raises(JackfieldError, match=words):
        model.generate(
            **inputs, max_new_tokens=3, custom_generate=jackfield.decoding("sample"), **asked
        )


def test_an_unknown_strategy_and_a_window(inputs: Any) -> None:
    model = build("mistral", torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(JackfieldError, match="there is no decoding 'beamy'"):
        model.generate(ids, max_new_tokens=3, custom_generate=jackfield.decoding("plugin:beamy"))
    right = torch.tensor([[1, 1, 1, 0]])
    with pytest.raises(JackfieldError, match="padded at their left"):
        model.generate(
            ids,
            attention_mask=right,
            max_new_tokens=3,
            custom_generate=jackfield.decoding("sample"),
        )


def test_beams_are_asked_for_in_the_selection(model: Any, inputs: Any) -> None:
    for options, asked in (
        ("num_beams=3", {"num_beams": 3}),
        ("num_beams=2&length_penalty=-1", {"num_beams": 2, "length_penalty": -1.0}),
    ):
        expected = model.generate(**inputs, max_new_tokens=24, do_sample=False, **asked)
        own = jackfield.decoding(f"beam?{options}")
        found = model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=own)
        # Behind the end transformers' beam search writes EOS where the padding is token 0.
        filled = (found[:, 1:] == 0) & (expected[:, 1:] == 1) & (expected[:, :-1] == 1)
        assert torch.equal(found[:, 1:].masked_fill(filled, 1), expected[:, 1:])
        with pytest.raises(JackfieldError, match=r"does not take length_penalty=2\.0"):
            model.generate(**inputs, max_new_tokens=4, custom_generate=own, length_penalty=2.0)


def test_beams_are_drawn_where_generate_samples(model: Any, inputs: Any) -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        own = jackfield.decoding("beam?num_beams=3")
        return model.generate(  # type: ignore[no-any-return]
            **inputs, max_new_tokens=12, do_sample=True, temperature=3.0, top_k=0,
            custom_generate=own,
        )  # fmt: skip

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1)[:, -12:], drawn(2)[:, -12:])

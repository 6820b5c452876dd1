"""Every setting is honoured, inert at its neutral value, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from jackfield.contracts import Settings
from jackfield.errors import PromptError, SettingsError
from jackfield.requests.honouring import Limits
from jackfield.requests.settings import DEFAULT_MAX_NEW_TOKENS, resolve
from jackfield.requests.token_settings import MOST_PHRASES, MOST_STOPS
from jackfield.requests.vocabulary import CODE, DRAFTING, FACTS, FILLED_IN, INERT, RETURNED
from jackfield.requests.wishes import notice_selectors, wishes
from jackfield_plugins.decoding.sample import Sample

PROMPT = 10
CONTEXT = 100
VOCAB = 50
LIMITS = Limits(
    vocab_size=VOCAB,
    context_length=CONTEXT,
    honoured=Sample.capabilities.settings,
    decoding="sample",
    has_tokenizer=True,
)
FIELDS = sorted(k for k in vars(GenerationConfig()) if not k.startswith("_"))
HONOURED = {
    "bad_words_ids": [[3], [4, 5]],
    "begin_suppress_tokens": [3],
    "do_sample": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "eos_token_id": [1, 2],
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "guidance_scale": 1.5,
    "max_length": 33,
    "max_new_tokens": 7,
    "max_time": 2.5,
    "min_length": 15,
    "min_new_tokens": 3,
    "min_p": 0.1,
    "no_repeat_ngram_size": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.2,
    "sequence_bias": {(3, 4): 1.5},
    "stop_strings": ["end"],
    "suppress_tokens": [7, 8],
    "temperature": 0.5,
    "top_h": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "typical_p": 0.5,
    "watermarking_config": {"bias": 1.5},
}
KNOBS = {
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
}  # fmt: skip
#: Where a flag, a number or a word is not the kind of value that a field holds.
UNUSUAL = {
    "cache_config": {"a": 1},
    "compile_config": {"a": 1},
    "constraints": [object()],
    "continuous_batching_config": {"a": 1},
    "force_words_ids": [[3]],
}


def ask(defaults: GenerationConfig | None = None, **asked: Any) -> Settings:
    return resolve(wishes(asked, defaults or GenerationConfig()), PROMPT, LIMITS)


def shown(settings: Settings) -> dict[str, Any]:
    return {**settings._asdict(), "seed": None}


def refusal(defaults: GenerationConfig | None = None, **asked: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        ask(defaults, **asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config_with(name: str, value: Any) -> GenerationConfig:
    """With a value that transformers itself may not accept."""
    config = GenerationConfig()
    setattr(config, name, value)
    return config


#: Honoured only beside another one, which `test_field_processors` has.
BESIDE_ANOTHER = {"exponential_decay_length_penalty"}
REFUSED = [f for f in FIELDS if f not in {*HONOURED, *FACTS, *BESIDE_ANOTHER}]


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_name(name: str) -> None:
    values = [v for v in (True, False, 7, 0.77, "x") if v not in INERT.get(name, ())]
    for value in [UNUSUAL[name]] if name in UNUSUAL else values:
        assert name in refusal(**{name: value})
        assert name in refusal(generation_config=config_with(name, value))
        if name in RETURNED:
            assert shown(ask(config_with(name, value))) == shown(ask())
        elif name not in CODE and name not in DRAFTING:
            message = refusal(config_with(name, value))
            assert name == "num_return_sequences" or f"lift it with {name}=None" in message
            assert name in message
            assert shown(ask(config_with(name, value), **{name: None})) == shown(ask())


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_that_is_honoured_changes_the_settings(name: str) -> None:
    changed = shown(ask(**{name: HONOURED[name]}))
    assert changed != shown(ask())
    config = GenerationConfig(**{name: HONOURED[name]})
    if name in RETURNED:  # of a model's own nobody asked for it
        assert shown(ask(generation_config=config)) == changed
        assert shown(ask(config)) == shown(ask())
        return
    assert shown(ask(config)) == shown(ask(generation_config=config))
    if name in KNOBS:  # which are nothing but `do_sample`'s
        assert shown(ask(config)) == shown(ask())
    elif name == "do_sample":
        assert shown(ask(config)) == {**changed, **FILLED_IN}
    else:
        assert shown(ask(config)) == changed
    assert shown(ask(config, **{name: None})) == shown(ask())


@pytest.mark.parametrize("name", INERT)
def test_a_neutral_value_asks_for_nothing(name: str) -> None:
    if name not in FIELDS:
        pytest.skip("this transformers has no such field")
    for value in INERT[name]:
        settings = shown(ask(**{name: value}))
        assert {**settings, "do_sample": False} == shown(ask())
        assert shown(ask(GenerationConfig(**{name: value}))) == shown(ask())


def test_neutral_values_are_those_of_transformers() -> None:
    defaults = GenerationConfig()._get_default_generation_params()
    known = {k: v for k, v in defaults.items() if v is not None and k != "max_length"}
    assert {k: FILLED_IN.get(k, INERT[k][0]) for k in known} == known


def test_facts_about_a_model_are_no_wishes() -> None:
    assert {"bos_token_id", "decoder_start_token_id", "pad_token_id"} < FACTS
    assert len(FACTS) == 4
    assert shown(ask(pad_token_id=3, bos_token_id=4)) == shown(ask())


@pytest.mark.parametrize("name", sorted({*CODE, *DRAFTING, "custom_generate", "assistant_model"}))
def test_data_never_selects_code(name: str, caplog: pytest.LogCaptureFixture) -> None:
    from_files = config_with(name, "static")
    assert shown(ask(from_files)) == shown(ask())
    assert name in refusal(**{name: "static"})
    assert name not in CODE or "jackfield.load" in refusal(**{name: "static"})
    notice_selectors(from_files, frozenset(), "a model")
    (record,) = caplog.records
    assert f"ignored {name}='static'" in record.getMessage()
    assert "generation_config of a model: data never selects code" in record.getMessage()
    caplog.clear()
    notice_selectors(GenerationConfig(num_assistant_tokens=20, use_cache=True), frozenset(), "x")
    notice_selectors(GenerationConfig(num_assistant_tokens=3), frozenset(DRAFTING), "x")
    assert not caplog.records


def test_an_unknown_field_names_the_nearest() -> None:
    assert "did you mean 'temperature'" in refusal(temprature=0.5)
    assert "did you mean 'max_new_tokens'" in refusal(max_new_token=5)
    assert "write max_new_tokens=5" in refusal(max_tokens=5)
    assert "'presence_penality'" in refusal(presence_penality=1.0)
    assert "frequency_penalty_" in refusal(
        generation_config=GenerationConfig(frequency_penalty_=0.5)
    )


def test_own_settings_reach_through_a_generation_config_too() -> None:
    config = GenerationConfig(frequency_penalty=0.5)
    assert ask(generation_config=config).frequency_penalty == 0.5


def test_own_settings() -> None:
    settings = ask(seed=3, logprobs=2, presence_penalty=0.5, frequency_penalty=-0.5, stop="x")
    assert (settings.seed, settings.logprobs) == (3, 2)
    assert (settings.presence_penalty, settings.frequency_penalty) == (0.5, -0.5)
    assert settings.stop_strings == ("x",)
    assert not settings.do_sample
    assert ask().logprobs is None
    assert ask(do_sample=True).seed != ask(do_sample=True).seed


def test_precedence_request_over_generation_config_over_model() -> None:
    model = GenerationConfig(temperature=0.3, top_k=9, do_sample=True, max_new_tokens=5)
    assert ask(model).temperature == 0.3
    assert ask(model).max_new_tokens == 5
    own = GenerationConfig(temperature=0.6, max_new_tokens=6)
    found = ask(model, generation_config=own, max_new_tokens=7)
    assert (found.temperature, found.top_k, found.max_new_tokens) == (0.6, 9, 7)
    assert ask(model, temperature=None).temperature == 1.0
    assert ask(model, do_sample=None).do_sample is False
    assert ask(model, max_new_tokens=None).max_new_tokens == CONTEXT - PROMPT


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.5}, True),
        ({"top_k": 4}, True),
        ({"top_p": 0.5}, True),
        ({"min_p": 0.5}, True),
        ({"top_h": 0.5}, True),
        ({"typical_p": 0.5}, True),
        ({"epsilon_cutoff": 0.5}, True),
        ({"eta_cutoff": 0.5}, True),
        ({"typical_p": 1.0, "eta_cutoff": 0.0, "epsilon_cutoff": 0.0}, False),
        ({"top_k": 0, "top_p": 1.0}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "top_k": 4}, False),
        ({"temperature": 0, "do_sample": False}, False),
        ({"seed": 3, "repetition_penalty": 2.0}, False),
    ],
)
def test_sampling_is_on_when_it_is_asked_for(asked: dict[str, Any], sampling: bool) -> None:
    assert ask(**asked).do_sample is sampling


def test_the_model_may_sample_by_default_and_the_request_may_not() -> None:
    model = GenerationConfig(do_sample=True, temperature=0.3, top_k=9)
    assert ask(model).do_sample
    assert not ask(model, do_sample=False).do_sample
    assert not ask(model, temperature=0).do_sample
    knobs_only = GenerationConfig()
    knobs_only.temperature = 0.3
    assert not ask(knobs_only).do_sample
    assert not ask(generation_config=knobs_only).do_sample
    assert ask(generation_config=knobs_only, do_sample=True).temperature == 0.3


def test_a_model_that_samples_at_temperature_0_is_greedy() -> None:
    model = GenerationConfig(do_sample=True)
    model.temperature = 0.0
    assert not ask(model).do_sample
    assert not ask(model, top_p=0.5).do_sample
    assert ask(model, temperature=0.5).do_sample
    assert "temperature=0" in refusal(model, do_sample=True)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"do_sample": False, "temperature": 0.5}, ("temperature", "do_sample=False")),
        ({"do_sample": False, "top_k": 5}, ("top_k", "do_sample=False")),
        ({"do_sample": True, "temperature": 0}, ("temperature=0", "do_sample=True")),
        ({"stop": "a", "stop_strings": ["b"]}, ("stop", "stop_strings")),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ("min_new_tokens=9", "max_new_tokens=8")),
        ({"max_length": PROMPT}, ("max_length=10", "10 tokens")),
        ({"max_time": 3, "deadline": 4}, ("max_time", "deadline")),
    ],
)
def test_contradictions(asked: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(**asked)
    assert all(word in message for word in words)


NUMBERS = [
    "epsilon_cutoff", "eta_cutoff", "frequency_penalty", "logprobs", "max_length",
    "max_new_tokens", "min_length",
    "min_new_tokens", "min_p", "presence_penalty", "repetition_penalty", "seed", "temperature",
    "top_h", "top_k", "top_p", "typical_p",
]  # fmt: skip
WRONG = [math.nan, math.inf, -math.inf, "1", [1], {}, object(), True, False, 1j, b"1"]


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_types_and_no_numbers_are_refused_by_name(name: str) -> None:
    for value in [*WRONG, torch.tensor([1, 2]), np.array([0.5, 0.5])]:
        assert name in refusal(**{name: value})


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"frequency_penalty", "presence_penalty"}))
def test_negative_numbers_are_refused_where_they_mean_nothing(name: str) -> None:
    assert name in refusal(**{name: -1})


@pytest.mark.parametrize(
    "asked",
    [
        {"top_p": 0}, {"top_p": 1.01}, {"min_p": 1.01}, {"repetition_penalty": 0},
        {"max_new_tokens": 0}, {"max_new_tokens": 2.5}, {"max_length": 0}, {"logprobs": VOCAB + 1},
        {"frequency_penalty": 1e39}, {"presence_penalty": -1e39}, {"repetition_penalty": 1e39},
        {"temperature": 1e39}, {"top_h": 0}, {"top_h": 1.01}, {"typical_p": 0}, {"typical_p": 1.01},
        {"epsilon_cutoff": 1}, {"eta_cutoff": 1},
    ],
    ids=str,
)  # fmt: skip
def test_out_of_range(asked: dict[str, Any]) -> None:
    assert next(iter(asked)) in refusal(**asked)


@pytest.mark.parametrize("name", ["bad_words_ids", "sequence_bias", "stop_strings", "eos_token_id",
                                  "suppress_tokens"])  # fmt: skip
def test_wrong_shapes_of_lists_are_refused_by_name(name: str) -> None:
    for value in [5.5, "" if name != "eos_token_id" else "x", object(), [object()], [[[3]]], [1.5]]:
        assert name in refusal(**{name: value})


@pytest.mark.parametrize(
    "asked",
    [
        {"eos_token_id": VOCAB}, {"eos_token_id": [3, -1]}, {"eos_token_id": True},
        {"suppress_tokens": [VOCAB]}, {"bad_words_ids": [[3, VOCAB]]}, {"bad_words_ids": [[]]},
        {"bad_words_ids": 3}, {"bad_words_ids": [3]}, {"sequence_bias": {(VOCAB,): 1.0}},
        {"sequence_bias": {(): 1.0}}, {"sequence_bias": 0},
        {"sequence_bias": {(3,): math.nan}}, {"sequence_bias": {(3,): math.inf}},
        {"sequence_bias": {(3,): 1e39}}, {"sequence_bias": {(3,): "1"}},
        {"sequence_bias": {"ab": 1.0}}, {"sequence_bias": [[[3], 1.0, 2.0]]},
        {"sequence_bias": 7},
    ],
    ids=str,
)  # fmt: skip
def test_token_ids_and_biases_out_of_range(asked: dict[str, Any]) -> None:
    assert next(iter(asked)) in refusal(**asked)


def test_biases_become_one_mapping() -> None:
    found = ask(
        sequence_bias=[[[3], 1.0], [[4, 5], -2]],
        bad_words_ids=[[6], [7, 8], [2]],
        suppress_tokens=[9],
        eos_token_id=2,
    ).sequence_bias
    never = -math.inf
    assert found == {(3,): 1.0, (4, 5): -2.0, (6,): never, (7, 8): never, (9,): never}


def test_what_was_asked_must_fit_into_the_context() -> None:
    room = CONTEXT - PROMPT
    assert ask(max_new_tokens=room).max_new_tokens == room
    with pytest.raises(PromptError, match=f"lower max_new_tokens to {room}"):
        ask(max_new_tokens=room + 1)
    with pytest.raises(PromptError, match="at most 99 tokens"):
        resolve(wishes({}, GenerationConfig()), CONTEXT, LIMITS)
    assert ask().max_new_tokens == room
    assert ask(GenerationConfig(max_new_tokens=5000)).max_new_tokens == room
    assert ask(GenerationConfig(max_length=30)).max_new_tokens == 30 - PROMPT
    assert ask(max_length=30).max_new_tokens == 30 - PROMPT
    assert ask(max_length=30, max_new_tokens=4).max_new_tokens == 4
    assert ask(GenerationConfig(max_new_tokens=4), max_length=30).max_new_tokens == 30 - PROMPT
    both = ask(
        GenerationConfig(max_new_tokens=4), generation_config=GenerationConfig(max_length=30)
    )
    assert both.max_new_tokens == 4  # as in transformers
    with pytest.raises(PromptError, match=f"lower max_new_tokens to {room}"):
        ask(generation_config=GenerationConfig(max_new_tokens=room + 1))
    endless = Limits(VOCAB, None, LIMITS.honoured, "sample", True)
    assert (
        resolve(wishes({}, GenerationConfig()), 10**6, endless).max_new_tokens
        == DEFAULT_MAX_NEW_TOKENS
    )


def test_min_length_counts_the_prompt() -> None:
    assert ask(min_length=15).min_new_tokens == 5
    assert ask(min_length=5).min_new_tokens == 0
    assert ask(min_length=15, min_new_tokens=3).min_new_tokens == 3  # as in transformers
    assert ask(GenerationConfig(min_new_tokens=3), min_length=15).min_new_tokens == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 4), ("token_healing", True), ("low_memory", True)],
)
def test_a_default_of_the_model_that_cannot_be_honoured_says_how_to_override(
    name: str, value: Any
) -> None:
    model = GenerationConfig(**{name: value})
    message = refusal(model)
    assert f"{name}={value}" in message
    assert "the model's generation_config" in message
    assert f"lift it with {name}=None" in message
    assert ask(model, **{name: None})
    assert ask(model, **{name: INERT[name][0]})


def test_a_default_of_the_model_that_is_no_token_says_where_it_comes_from() -> None:
    message = refusal(GenerationConfig(eos_token_id=50256))
    assert "50256" in message
    assert "the model's generation_config" in message
    assert ask(GenerationConfig(eos_token_id=50256), eos_token_id=[]).eos_token_ids == ()


@pytest.mark.parametrize(
    "name",
    [n for n in sorted(HONOURED.keys() - RETURNED) if isinstance(HONOURED[n], int | float)],
)
def test_a_default_of_the_model_that_is_no_number_says_where_it_comes_from(name: str) -> None:
    defaults = config_with(name, "x")
    defaults.do_sample = defaults.do_sample or True
    if name != "max_time":
        assert "which the model's generation_config sets" in refusal(defaults)
    assert "generation_config" not in refusal(**{name: "x"})
    ask(defaults, **{name: None})


def test_a_length_of_the_model_that_the_prompt_has_reached_is_one_sentence() -> None:
    said = refusal(GenerationConfig(max_length=PROMPT))
    assert f"max_length={PROMPT}, which the model's generation_config sets, leaves no" in said
    assert f"max_length={PROMPT} leaves no" in refusal(max_length=PROMPT)


def test_what_is_looked_at_after_every_token_is_bounded() -> None:
    stops = [f"x{i}" for i in range(MOST_STOPS)]
    assert len(ask(stop=[*stops, *stops]).stop_strings) == MOST_STOPS
    assert f"{MOST_STOPS} are the most" in refusal(stop=[*stops, "y"])
    phrases = [[i % VOCAB, i // VOCAB % VOCAB, i // VOCAB**2] for i in range(MOST_PHRASES)]
    single = [[i] for i in range(VOCAB)]
    assert len(ask(bad_words_ids=[*phrases, *single]).sequence_bias) == MOST_PHRASES + VOCAB
    assert f"{MOST_PHRASES} are the most" in refusal(bad_words_ids=[*phrases, [1, 2, 3, 4]])
    assert f"{MOST_PHRASES} are the most" in refusal(
        bad_words_ids=phrases, sequence_bias={(1, 2, 3, 4): 1.0}
    )
    assert ask(eos_token_id=[3, 1, 3, 1]).eos_token_ids == (3, 1)


def test_stops_need_a_tokenizer() -> None:
    bare = Limits(VOCAB, CONTEXT, LIMITS.honoured, "sample", has_tokenizer=False)
    with pytest.raises(SettingsError, match="tokenizer"):
        resolve(wishes({"stop": ["x"]}, GenerationConfig()), PROMPT, bare)
    assert resolve(wishes({"stop": []}, GenerationConfig()), PROMPT, bare).stop_strings == ()


def test_a_decoding_that_honours_less_refuses_by_name() -> None:
    bare = Limits(VOCAB, CONTEXT, frozenset(), "bare", has_tokenizer=True)
    for name in sorted(Sample.capabilities.settings):
        value = HONOURED.get(name, 1)
        with pytest.raises(SettingsError, match=f"'bare' does not honour {name}"):
            resolve(wishes({name: value}, GenerationConfig()), PROMPT, bare)


def test_a_live_models_own_config_is_not_told_as_a_file(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    import jackfield

    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    said: dict[str, Any] = {"cache_implementation": "static", "eos_token_id": 999}
    model.generation_config = GenerationConfig(**said)
    with jackfield.load(model) as engine, pytest.raises(SettingsError) as caught:
        engine.generate([1, 2])
    texts = [str(caught.value), *(record.getMessage() for record in caplog.records)]
    assert len([text for text in texts if "generation_config" in text]) == 2
    assert not any("generation_config.json" in text for text in texts)


def test_the_way_to_end_at_no_token_is_told() -> None:
    import jackfield

    with jackfield.load("demo") as engine:
        with pytest.raises(SettingsError, match="eos_token_id=None ends at none"):
            engine.generate("a", eos_token_id=-1)
        found = engine.generate("Hello", eos_token_id=None, max_new_tokens=30)[0]
        assert len(found.token_ids) == 30

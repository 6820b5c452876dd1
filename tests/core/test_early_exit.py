"""A model's own first layers as its draft model: what is asked, refused, held and given back."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import transformers
from families import build, config_of, prompts

import jackfield
from jackfield.contracts import Decoding, DecodingCapabilities
from jackfield.errors import (
    ExecutionError,
    JackfieldError,
    OptionError,
    PlanError,
    PluginError,
    SettingsError,
    UsageError,
)
from jackfield.planning.strategies import exits_early
from jackfield.registry.backends import Choice, Registered

EARLY = "assisted?assistant_early_exit=1"
EAGER = f"{EARLY}&min_acceptance_rate=0&min_speedup=0&assistant_confidence_threshold=0"
PROMPTS = prompts((3, 17, 8))


def assert_wrong(error: type[JackfieldError], text: str, call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def sharing() -> transformers.PreTrainedConfig:
    """Layers of Gemma 3n, of which none shares keys and values; with fewer some would."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return transformers.Gemma3nTextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=[48] * 6, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_kv_shared_layers=0,
        layer_types=kinds, sliding_window=8, vocab_size_per_layer_input=50, laurel_rank=4,
        hidden_size_per_layer_input=8, activation_sparsity_pattern=[0.0] * 6, altup_num_inputs=2,
    )  # fmt: skip


def one_layer() -> transformers.PreTrainedConfig:
    config = config_of("llama")
    config.num_hidden_layers = 1
    return config


@pytest.mark.parametrize(
    ("model", "arguments", "error", "text"),
    [
        ("llama", {"decoding": "assisted?assistant_early_exit=0"}, OptionError, "at least 1, not"),
        ("llama", {"decoding": "assisted?assistant_early_exit=-2"}, OptionError, "at least 1, not"),
        ("llama", {"decoding": "assisted?assistant_early_exit=x"}, OptionError, "type int"),
        ("llama", {"decoding": "assisted?assistant_early_exit=2"}, UsageError,
         "assistant_early_exit=2 leaves no layer out: LlamaForCausalLM has 2 layers; give 1 to 1"),
        ("one", {"decoding": EARLY}, UsageError, "has 1 layer; drop it"),
        ("llama", {"decoding": EARLY, "assistant_model": "demo-draft"}, UsageError,
         "assistant_model is not used: the draft model of 'assisted' is the model's own"),
        ("llama", {"decoding": {"a": EARLY, "b": "assisted"}, "assistant_model": "demo-draft"},
         UsageError, "'a' and 'b' need two draft models, and an engine has one"),
        ("gemma3", {"decoding": EARLY, "assistant": {"dtype": "float32"}}, UsageError,
         "the key 'dtype', and with assistant_early_exit the draft model is the model itself"),
        ("llama", {"decoding": EARLY, "assistant": ["dtype"]}, UsageError, "must be a mapping"),
        ("llama", {"decoding": EARLY, "assistant": {"cache_implementation": "static"}}, PlanError,
         "assistant_early_exit=1: .*'static'.*rollback"),
        ("llama", {"decoding": EARLY, "tp_size": 2}, UsageError, "does not go with tp_size=2"),
        ("llama", {"decoding": EARLY, "device_map": {"": "cpu", "lm_head": "disk"}}, UsageError,
         "does not go with weights in several places"),
        ("shares", {"decoding": "assisted?assistant_early_exit=4"}, PlanError,
         "cannot end at layer 4: where fewer follow, its first layers are others; give an"),
        ("lfm2", {"decoding": EARLY}, PlanError, "cannot take back tokens of linear_attention"),
        ("llama", {"decoding": EARLY, "deterministic": True}, PlanError, "deterministic=True"),
    ],
)  # fmt: skip
def test_before_any_weight_is_read(
    model: str, arguments: dict[str, Any], error: type[JackfieldError], text: str
) -> None:
    own = {"shares": sharing, "one": one_layer}
    config = own[model]() if model in own else config_of(model)
    assert_wrong(error, text, lambda: jackfield.plan(config, **arguments))


@pytest.mark.parametrize("said", [0, True, "1", 1.0])
def test_a_plugin_that_ends_at_no_layer_is_named(said: Any) -> None:
    class Odd(Decoding):
        name = "odd"
        capabilities = DecodingCapabilities(rollback=True, assistant=True)
        bind = None  # type: ignore[assignment]

        def early_exit(self, options: Any) -> Any:
            return said

    choice = Choice(Registered(Odd(), "strange", "1", "odd"), None, "named")
    assert_wrong(
        PluginError, "'odd' of strange 1.*must return 1 or more", lambda: exits_early(choice)
    )


@pytest.fixture(scope="module")
def offering() -> Any:
    config = config_of("llama")
    config.num_hidden_layers = 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.generation_config.pad_token_id = 0
    with jackfield.load(
        model, decoding={"plain": "sample", "two": EAGER.replace("=1", "=2", 1)}
    ) as engine:
        yield engine


def test_a_request_that_names_a_layer_gets_what_ends_there(offering: jackfield.Engine) -> None:
    def chosen(**asked: Any) -> str:
        (found,) = offering.generate(PROMPTS[0], max_new_tokens=4, **asked)
        return found.report["decoding"].name

    assert chosen() == "plain"
    assert chosen(assistant_early_exit=2) == "two"
    assert chosen(decoding="two", assistant_early_exit=2) == "two"
    assert chosen(assistant_early_exit=2, num_assistant_tokens=3) == "two"
    config = transformers.GenerationConfig(assistant_early_exit=2)
    assert chosen(generation_config=config) == "two"
    assert chosen(generation_config=config, assistant_early_exit=None) == "plain"


OTHER = (
    r"^assistant_early_exit=3: the draft model of this engine ends at layer 2 \(decoding 'two'\); "
    r"ask for 2, or load it with decoding='assisted\?assistant_early_exit=3'$"
)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"assistant_early_exit": 3}, OTHER),
        ({"decoding": "two", "assistant_early_exit": 3}, OTHER),
        ({"decoding": "plain", "assistant_early_exit": 2}, "'plain' does not honour .*g='two'"),
        ({"assistant_early_exit": 0}, "at least 1, not 0"),
        ({"assistant_early_exit": True}, "must be a whole number"),
        ({"assistant_early_exit": "2"}, "must be a whole number"),
    ],
)  # fmt: skip
def test_a_request_that_names_another_layer_is_told(
    offering: jackfield.Engine, asked: dict[str, Any], text: str
) -> None:
    assert_wrong(SettingsError, text, lambda: offering.generate(PROMPTS[0], **asked))


def test_an_engine_that_has_none_says_how_to_have_one() -> None:
    with jackfield.load(build("llama")) as engine:
        text = r"honour assistant_early_exit=1;.*decoding='assisted\?assistant_early_exit=N'\)"
        assert_wrong(
            SettingsError, text, lambda: engine.generate(PROMPTS[0], assistant_early_exit=1)
        )


@pytest.mark.parametrize("said", [1, 2, "x"])
def test_a_models_own_config_selects_nothing(said: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    model.generation_config.assistant_early_exit = said
    for decoding in ("sample", EAGER):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jackfield.load(model, decoding=decoding) as engine:
            (found,) = engine.generate(PROMPTS[0], max_new_tokens=6)
        assert found.report["decoding"].name == decoding.partition("?")[0]
        assert f"ignored assistant_early_exit={said!r}" in caplog.text


def test_no_weight_is_there_twice_and_the_cache_has_its_layers_alone() -> None:
    model = build("llama")
    plan = jackfield.plan(model, decoding=EARLY, cache_implementation="paged")
    draft = plan.assistant
    assert draft.early_exit == 1
    assert (draft.requirements.weight_bytes, draft.placement.sizes) == (0, {})
    assert draft.token_bytes() * 2 == plan.token_bytes()  # one of two layers
    assert "weights: none of its own, the model's first 1 layers" in str(plan)
    assert "assistant: decoding: sample" in str(plan)
    assert f"decoding: {EARLY} (named), jackfield" in str(plan)
    assert plan.to_dict()["assistant"]["early_exit"] == 1
    with jackfield.load(
        model, decoding=EARLY, cache_implementation="paged?num_tokens=64"
    ) as engine:
        held = engine._loop.decoding.strategies["assisted"]._inner._assistant.bound
        assert {p.data_ptr() for p in held.model.parameters()} < {
            p.data_ptr() for p in model.parameters()
        }
        own, drafts = engine.statistics().cache.num_bytes, held.cache.usage().num_bytes
        assert 2 * drafts == own


def test_a_hook_that_fails_in_a_draft_says_whose_draft_it_is() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("gone")

    with jackfield.load(build("llama"), decoding=EARLY) as engine:
        drafting = engine._loop.decoding.strategies["assisted"]._inner._assistant.bound.model
        drafting.model.register_forward_pre_hook(fail)
        text = "a draft by the first 1 layers of LlamaForCausalLM, raised KeyError: 'gone'; mend it"
        with pytest.raises(ExecutionError, match=text):
            engine.generate(PROMPTS, max_new_tokens=4)


@pytest.mark.parametrize("trains", [False, True])
def test_a_live_model_is_given_back_as_it_was(trains: bool) -> None:
    model = build("llama").train(trains)
    before = {**vars(model.config)}, [dict(vars(m)) for m in model.modules()]
    with jackfield.load(model, decoding=EAGER) as engine:
        engine.generate(PROMPTS, max_new_tokens=4)
    assert ({**vars(model.config)}, [dict(vars(m)) for m in model.modules()]) == before
    assert engine.report().speculation.proposed > 0


def test_a_model_whose_layers_somebody_wrapped() -> None:
    model = build("llama")
    layer = model.model.layers[0]
    layer.forward = layer.forward
    text = "the forward of a LlamaDecoderLayer was replaced .*; undo that first, or drop"
    assert_wrong(ExecutionError, text, lambda: jackfield.load(model, decoding=EARLY))


@pytest.mark.parametrize("quantization", ["int8-cpu", "int4-cpu"])
def test_layers_that_are_quantized_are_shared(quantization: str) -> None:
    offered = {"plain": "sample", "early": EAGER.replace("=1", "=6", 1)}
    with jackfield.load("demo", decoding=offered, quantization=quantization) as engine:
        plain, drafted = (
            engine.generate("Once upon a time", max_new_tokens=24, decoding=name)[0]
            for name in offered
        )
        assert engine.plan.assistant["quantizer"].registered.name == quantization
        assert drafted.report["assistant attention"].calls > 0
    assert plain.token_ids == drafted.token_ids
    assert drafted.report.speculation.proposed > 8


@pytest.mark.parametrize("compiler", ["native", "inductor"])
@pytest.mark.long
def test_steps_that_are_compiled(compiler: str) -> None:
    offered = {"plain": "sample", "early": EAGER.replace("=1", "=6", 1)}
    try:
        engine = jackfield.load("demo", decoding=offered, compile=compiler, dtype="float32")
    except PlanError as refused:
        pytest.skip(str(refused))
    with engine:
        plain, drafted = (
            engine.generate("Once upon a time", max_new_tokens=24, decoding=name)[0]
            for name in offered
        )
        assert engine.plan.assistant["compiler"].registered.name == compiler
    assert plain.token_ids == drafted.token_ids


def test_an_estimate_says_what_it_leaves_out() -> None:
    text = "does not count a draft model; ask without the decoding"
    assert_wrong(UsageError, text, lambda: jackfield.estimate("demo", decoding=EARLY))

"""What a model needs shows in one step on the meta device, before a weight is loaded."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch
import transformers
from families import FAMILIES, MORE_FAMILIES, VOCAB, config_of
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.git.modeling_git import GitModel

import jackfield
from jackfield.bridge import requirements
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.probe import Probe, probe
from jackfield.errors import CheckpointError, PlanError

GATED = FAMILIES["llama"].arguments
TABLES = (AttentionInterface, AttentionMaskInterface, ExpertsInterface)


def irregular(config: Any) -> str | None:
    return jackfield.plan(config).requirements.irregular


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_the_table_of_families_is_probed_and_nothing_stays(family: str) -> None:
    before = [dict(table._global_mapping) for table in TABLES]
    calls = probe(meta_model(config_of(family))).calls
    attends_itself = family in ("bloom", "falcon-alibi")
    assert bool(calls) != attends_itself
    assert not any(call.own_mask for call in calls)
    assert [dict(table._global_mapping) for table in TABLES] == before


def test_a_layer_is_called_once_and_caches_for_itself() -> None:
    assert irregular(config_of("llama")) is None
    assert irregular(config_of("mistral")) is None
    assert irregular(config_of("diffllama")) == "a layer's attention is called 2 times a step"
    assert "is called" in str(irregular(config_of("hrm-text")))


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_read_what_another_one_keeps(family: str) -> None:
    needs = jackfield.plan(config_of(family)).requirements
    assert needs.irregular is None
    assert needs.shared_layers == ((2, 0), (3, 1))
    assert len(needs.packed_shapes) == len(needs.layer_types) == 2


def test_a_window_of_the_cache_that_the_mask_does_not_have() -> None:
    config = transformers.MoshiConfig(
        **{**GATED, "tie_word_embeddings": True}, sliding_window=8, num_codebooks=1
    )
    if "MoshiForCausalLM" not in jackfield.plan(config).requirements.architecture:
        pytest.skip("another class for it")
    with pytest.raises(PlanError, match="its mask has no such window"):
        jackfield.plan(config, cache_implementation="paged")


def test_a_mask_of_the_models_own() -> None:
    config = transformers.DogeConfig(**GATED)
    assert "own_mask" in jackfield.plan(config).requirements.features
    assert jackfield.plan(config, attn_implementation="sdpa")
    with pytest.raises(PlanError, match=r"does not support own_mask \(DogeForCausalLM makes"):
        jackfield.plan(config, attn_implementation="flex_attention")
    with pytest.raises(PlanError, match="no place for a mask of the model's own"):
        jackfield.plan(config, cache_implementation="paged")


class Handing(transformers.LlamaForCausalLM):
    """Hands its attention what its own call was given, and `of_its_own` beside."""

    of_its_own: ClassVar[dict[str, Any]] = {}

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
        past_key_values: Any = None, logits_to_keep: int = 0, **kwargs: Any,
    ) -> Any:  # fmt: skip
        found = self.model(
            input_ids, attention_mask, position_ids, past_key_values,
            logits_to_keep=logits_to_keep, **kwargs, **self.of_its_own,
        )  # fmt: skip
        logits = self.lm_head(found[0][:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


class HandingOdd(Handing):
    of_its_own: ClassVar[dict[str, Any]] = {"odd": 1}


@pytest.mark.parametrize("cls", [Handing, HandingOdd])
def test_what_a_model_hands_to_its_attention_is_seen_before_it_runs(cls: type[Handing]) -> None:
    torch.manual_seed(0)
    model = cls(config_of("llama"))
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    ids = [5, 6, 7, 8]
    expected = model.generate(torch.tensor([ids]), **settings)[0, 4:].tolist()
    why = r"own_attention \(HandingOdd hands its attention 'odd'\)"
    with jackfield.load(model) as engine:
        assert engine.generate([ids], **settings)[0].token_ids == expected
        chosen = str(engine.plan["attention"].registered)
    if cls.of_its_own:
        assert "eager" in chosen
        with pytest.raises(PlanError, match=why):
            jackfield.plan(model, attn_implementation="sdpa")
    else:
        assert "eager" not in chosen


class BesideAnother(transformers.LlamaForCausalLM):
    """As one is in whose file another attention stands that is looked up by nobody (GOT-OCR2)."""

    _can_set_attn_implementation_cached_value = False


@pytest.mark.parametrize("chosen", ["auto", "sdpa", "eager"])
def test_a_text_model_beside_another_has_its_attention_replaced(chosen: str) -> None:
    torch.manual_seed(0)
    model = BesideAnother(config_of("llama"))
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    ids = [5, 6, 7, 8]
    expected = model.generate(torch.tensor([ids]), **settings)[0, 4:].tolist()
    with jackfield.load(model, attn_implementation=chosen) as engine:
        assert "own_attention" not in engine.plan.requirements.features
        assert engine.generate([ids], **settings)[0].token_ids == expected


@pytest.mark.parametrize("name", ["Bart", "MBart", "Pegasus", "Marian", "Whisper", "Blenderbot"])
def test_positions_that_are_columns_are_refused(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=48, pad_token_id=0, is_encoder_decoder=False,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="numbers tokens by their column") as caught:
        jackfield.plan(config)
    assert "\n" not in str(caught.value)


def test_a_model_whose_own_code_mixes_dtypes_is_refused_in_float64() -> None:
    config = transformers.XGLMConfig(
        vocab_size=VOCAB, d_model=32, attention_heads=4, num_layers=1, ffn_dim=48
    )
    assert jackfield.plan(config, dtype="float32")
    with pytest.raises(CheckpointError, match="load it in another dtype"):
        jackfield.plan(config, dtype="float64")


def test_bidirectional_configs_are_refused() -> None:
    for config in (
        transformers.LlamaConfig(**GATED, is_causal=False),
        transformers.GemmaConfig(**GATED, head_dim=8, use_bidirectional_attention=True),
        transformers.Gemma3TextConfig(
            **GATED, head_dim=8, sliding_window=8, use_bidirectional_attention=True
        ),
    ):
        with pytest.raises(CheckpointError, match="reads its text in both directions"):
            jackfield.plan(config)


def test_a_prefix_model_needs_an_attention_and_a_cache_that_can() -> None:
    config = config_of("hrm-text")
    plan = jackfield.plan(config)
    assert plan.requirements.features["bidirectional_prefix"] == "prefix_lm = True"
    with pytest.raises(PlanError, match="a prefix that is read in both directions"):
        jackfield.plan(config, cache_implementation="paged")
    config.prefix_lm = False
    assert "bidirectional_prefix" not in jackfield.plan(config).requirements.features


def test_a_state_beside_the_cache_is_refused() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, lru_width=32, attention_window_size=8,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="keeps what it has read in its modules"):
        jackfield.plan(config)


def test_a_text_model_beside_a_vision_model_has_attention_of_its_own() -> None:
    git = jackfield.plan(transformers.GitConfig(vocab_size=VOCAB, num_hidden_layers=1))
    assert "own_attention" in git.requirements.features
    ragged = "a row padded at the left says something else"
    if "past_key_values is not None and seq_len == 1" in inspect.getsource(GitModel.forward):
        # Git of transformers 5.17 takes no step of one token without a mask.
        ragged = "a small model of its kind could not be tried: 'NoneType' object has no attribute"
    assert git.requirements.ragged is not None
    assert git.requirements.ragged.startswith(ragged)
    with pytest.raises(CheckpointError, match="a cache of its own class"):
        jackfield.plan(transformers.MiniMaxConfig(**GATED))


def test_a_model_that_cannot_be_probed_is_planned_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("needs numbers")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fails)
    assert probe(meta_model(config_of("llama"))) == Probe()


def test_models_that_are_alike_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the config says and by the class; not by which object it is."""
    seen = []

    class Another(transformers.LlamaForCausalLM):
        pass

    monkeypatch.setattr(requirements, "probe", lambda model: seen.append(model) or probe(model))
    for heads in (1, 2, 1, 2):
        config = transformers.LlamaConfig(**{**GATED, "head_dim": 28, "num_key_value_heads": heads})
        for model in (config, Another(config), Another(config)):
            assert jackfield.plan(model).requirements.kv_numbers == (2 * heads * 28,) * 2
    assert [type(model) for model in seen] == [transformers.LlamaForCausalLM, Another] * 2


def test_experts_in_float64(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("qwen3-moe")
    config._experts_implementation = None
    torch.manual_seed(0)
    live = AutoModelForCausalLM.from_config(config).double()
    live.save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"call model.set_experts_implementation\('eager'\)"):
        jackfield.plan(live)
    caplog.set_level("INFO", "jackfield")
    with jackfield.load(tmp_path, dtype="float64") as engine:
        assert "experts: eager, since" in engine.explain()
        assert engine.plan.to_dict()["experts_implementation"] == "eager"
        found = engine.generate([[5, 6, 7]], max_new_tokens=3)
    assert "experts run as eager" in caplog.text
    live.set_experts_implementation("eager")
    with jackfield.load(live) as engine:
        assert engine.generate([[5, 6, 7]], max_new_tokens=3)[0].token_ids == found[0].token_ids
    assert jackfield.plan(tmp_path, dtype="float32").requirements.experts_implementation is None
    assert jackfield.plan("demo", dtype="float64").requirements.experts_implementation is None

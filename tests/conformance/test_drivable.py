"""Models that the loop cannot drive rightly are refused before anything runs."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import FAMILIES, VOCAB, build, oracle, prompts
from transformers.models.llama.modeling_llama import LlamaAttention

import jackfield
from jackfield.errors import CheckpointError, PlanError, PromptError, UsageError

TINY = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize("name", ["OpenAIGPTConfig", "RwkvConfig"])
def test_a_model_without_a_kv_cache_is_refused(name: str) -> None:
    config = getattr(transformers, name)(vocab_size=VOCAB, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="does not generate with a KV cache"):
        jackfield.plan(config)


def test_longrope_ends_where_its_positions_change() -> None:
    arguments = {**FAMILIES["phi3"].arguments, "sliding_window": None}
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4, "original_max_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Phi3Config(
        **arguments, rope_parameters=rope, original_max_position_embeddings=16
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    (prompt,) = prompts((12,))
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        assert engine.generate(prompt, max_new_tokens=4)[0].token_ids == oracle(model, prompt, 4)
        with pytest.raises(PromptError, match="context of 16"):
            engine.generate(prompt, max_new_tokens=5)


def test_a_model_that_reads_the_name_runs_its_own_attention() -> None:
    config = transformers.DeepseekV32Config(
        **TINY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, index_topk=4, index_n_heads=2, index_head_dim=16,
        initializer_range=0.35, max_position_embeddings=64, first_k_dense_replace=1,
        experts_implementation="eager",
    )  # fmt: skip
    with pytest.raises(PlanError, match="AttentionInterface alone"):
        jackfield.plan(config, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    (prompt,) = prompts((12,))
    expected = oracle(model, prompt, 6)
    with jackfield.load(model, attn_implementation="eager") as engine:
        assert engine.generate(prompt, max_new_tokens=6)[0].token_ids == expected
        assert engine.report()["attention"].calls == 12


def test_an_attention_that_derives_from_a_models_own() -> None:
    class Mine(LlamaAttention):
        """In a module without an eager function of its own."""

    model = build("llama")
    (prompt,) = prompts((6,))
    expected = oracle(model, prompt, 5)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    with jackfield.load(model, attn_implementation="eager") as engine:
        assert engine.generate(prompt, max_new_tokens=5)[0].token_ids == expected


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("bogus", "is not a device"),
        (0.5, "a device or a dict of module"),
        ({"": "cpu"}, "a live model is used where it is"),
    ],
)
def test_a_device_that_is_none_is_refused(device: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        jackfield.plan(build("llama"), device_map=device)  # type: ignore[arg-type]


def on_meta(name: str, config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        model: transformers.PreTrainedModel = getattr(transformers, name)(config)
    return model


NO_HEADS = ("LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification",
            "LlamaForQuestionAnswering", "GPT2Model", "GPT2ForSequenceClassification", "BertModel",
            "BertForMaskedLM", "BertForSequenceClassification")  # fmt: skip


@pytest.mark.parametrize("name", NO_HEADS)
def test_every_class_that_makes_no_text_is_refused_by_name(name: str) -> None:
    model = on_meta(name, getattr(transformers, name).config_class())
    for call in (jackfield.plan, jackfield.load):
        with pytest.raises(CheckpointError, match=f"{name} .*generates no text"):
            call(model)

"""Adapters that bring more than their own weights, and configs that somebody wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.bridge.adapter_files import hushed, read_config
from jackfield.errors import CheckpointError, UsageError

peft = pytest.importorskip("peft", reason="needs jackfield[peft]")

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def base(*, tied: bool = False) -> Any:
    """A model with biases everywhere, always the same one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, attention_bias=True,
            mlp_bias=True, initializer_range=0.3, tie_word_embeddings=tied,
        )  # fmt: skip
        model = LlamaForCausalLM(config).double().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return model


def with_adapter(model: Any, config: Any) -> Any:
    """`model` in PEFT's wrapper, with random numbers in all that was trained."""
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, config)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
    return wrapped.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    base().save_pretrained(path)
    return path


def loaded(folder: Path, adapter: Path, **more: Any) -> jackfield.Engine:
    return jackfield.load(
        folder, adapter=adapter, dtype="float64", cache_implementation="dynamic", **more
    )


KINDS: dict[str, Any] = {
    **{
        f"lora-{bias}": lambda bias=bias, **more: peft.LoraConfig(r=4, bias=bias, **more)
        for bias in ("none", "all", "lora_only")
    },
    "dora-all": lambda **more: peft.LoraConfig(r=4, use_dora=True, bias="all", **more),
    "loha": lambda **more: peft.LoHaConfig(r=4, **more),
    "lokr": lambda **more: peft.LoKrConfig(r=4, **more),
    "ia3": lambda **more: peft.IA3Config(feedforward_modules=["down_proj"], **more),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [None, ["lm_head"]])
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["k_proj", "down_proj", "v_proj"]])
@pytest.mark.one_in(4)
def test_off_is_the_model_and_on_is_the_adapter(
    folder: Path, tmp_path: Path, kind: str, saved: list[str] | None, targets: list[str]
) -> None:
    """Bit by bit, also for the biases that PEFT writes over the model's."""
    config = KINDS[kind](target_modules=targets, modules_to_save=saved, task_type="CAUSAL_LM")
    reference = with_adapter(base(), config)
    reference.save_pretrained(tmp_path)
    with loaded(folder, tmp_path) as engine:
        on = logits(engine.model)
        assert torch.allclose(on, logits(reference), rtol=0, atol=1e-9)
        for _ in range(2):
            engine.disable_adapter()
            assert torch.equal(logits(engine.model), logits(base()))
            engine.enable_adapter()
            assert torch.equal(logits(engine.model), on)
    with loaded(folder, tmp_path, merge_adapter=True) as engine:
        assert torch.allclose(logits(engine.model), logits(reference), rtol=0, atol=1e-6)
        with pytest.raises(UsageError, match="merged into the weights"):
            engine.disable_adapter()


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_a_live_model_whose_biases_are_gone_is_not_switched_off(bias: str) -> None:
    config = peft.LoraConfig(r=4, bias=bias, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = with_adapter(base(), config)
    before = logits(model)
    with jackfield.load(model, cache_implementation="dynamic") as engine:
        if bias == "none":
            engine.disable_adapter()
        else:
            with pytest.raises(UsageError, match="cannot be switched off"):
                engine.disable_adapter()
            assert torch.equal(logits(engine.model), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_the_embedding_and_the_head(folder: Path, tmp_path: Path, target: str) -> None:
    """They run as PEFT runs them; what PEFT adds by itself would replace the model's own."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", target], task_type="CAUSAL_LM")
    reference = with_adapter(base(), config)
    reference.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    with loaded(folder, tmp_path / "plain") as engine:
        assert torch.allclose(logits(engine.model), logits(reference), rtol=0, atol=1e-9)
        engine.disable_adapter()
        assert torch.equal(logits(engine.model), logits(base()))
    with hushed():
        reference.save_pretrained(tmp_path / "auto")
    with pytest.raises(CheckpointError, match="save_embedding_layers=False"):
        jackfield.plan(folder, adapter=tmp_path / "auto")


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_of_an_embedding(tmp_path: Path, tied: bool) -> None:
    base(tied=tied).save_pretrained(tmp_path / "model")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[1, 3], task_type="CAUSAL_LM"
    )
    reference = with_adapter(base(tied=tied), config)
    reference.save_pretrained(tmp_path / "adapter")
    if tied:
        with pytest.raises(CheckpointError, match="is the output head too"):
            jackfield.plan(tmp_path / "model", adapter=tmp_path / "adapter")
        return
    with loaded(tmp_path / "model", tmp_path / "adapter") as engine:
        assert torch.allclose(logits(engine.model), logits(reference), rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with_adapter(base(), config).save_pretrained(path)
    return path


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from(["no", "yes", "x", "\x1b[31mred\x1b[0m\nline", "\ud800", "y" * 5000, ""]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["x", "q_proj"]), st.integers(), max_size=1),
    st.just(deep(300)),
)
FIELDS = sorted(json.loads(json.dumps(peft.LoraConfig().to_dict(), default=list)))


def refusal(folder: Path, adapter: Path) -> str:
    """What a plan with this adapter says against it, or nothing."""
    try:
        jackfield.plan(folder, adapter=adapter)
    except UsageError as error:
        return str(error)
    return ""


@given(name=st.sampled_from([*FIELDS, "peft_type", "of_next\x1b[31m_year"]), value=ODD)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_of_any_field(
    folder: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    """A plan comes of it, or an error of ours on one line that names the adapter or its file."""
    mine = tmp_path_factory.mktemp("odd") / "adapter"
    shutil.copytree(adapter, mine)
    file = mine / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    said = refusal(folder, mine)
    assert said.isprintable()
    assert not said or str(mine) in said
    assert len(said) < 1000
    if name in ("use_dora", "use_rslora", "fan_in_fan_out") and type(value) is not bool:
        with pytest.raises(CheckpointError, match=f"{name} is|levels|surrogate"):
            jackfield.plan(folder, adapter=mine)


def test_deep_and_broken_configs(adapter: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(adapter, tmp_path / "adapter")
    for text in ("[" * 100_000, "[]", "null", "{", "", '{"peft_type": ["LORA"]}', '{"a": 1}'):
        (mine / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError) as caught:
            read_config(mine)
        assert str(caught.value).isprintable()

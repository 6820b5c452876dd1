"""Every quantizer on the demo model: planned bytes, parity, saving, plain transformers code.

What a test of one of them needs is in QUANTIZERS; gptq has its own file, since it takes a minute.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import extras
import pytest
import torch
from fake_cuda import FakeCuda, Gpu
from families import config_of
from quantized import follows, oracle, tokens_of

import jackfield
from jackfield.bridge.footprint import loaded_bytes
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, OptionError, PlanError
from jackfield.estimates.evaluation import evaluate

#: The bytes of the demo model in float32: 8 layers of 405,504 numbers in linear layers, 3,264
#: norms and 147,456 embeddings.
FLOAT32 = 13_579_008
LINEAR = 8 * 405_504
REST = FLOAT32 - 4 * LINEAR
SCALED_ROWS = 8 * 1792  # rows of all linear layers

needs_bnb = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs jackfield[bnb]"
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs jackfield[torchao]"
)
INT4 = "torchao?type=int4-weight-only"


def each(**expected: Any) -> list[Any]:
    """Parameters: a selection and what is expected of it, skipped where its library is not."""
    return [
        pytest.param(name, value, marks=needs_bnb if name.startswith("bnb") else needs_torchao)
        for name, value in {SELECTIONS[key]: value for key, value in expected.items()}.items()
    ]


SELECTIONS = {
    "int8": "bnb-8bit",
    "nf4": "bnb-4bit",
    "fp4": "bnb-4bit?type=fp4",
    "nested": "bnb-4bit?double_quantization=true",
    "ao_int8": "torchao",
    "ao_groups": "torchao?type=int8-weight-only&group_size=64",
    "ao_dynamic": "torchao?type=int8-dynamic",
    "ao_int4": INT4,
    "ao_int4_wide": f"{INT4}&group_size=64",
}
SAVED = [k for k in SELECTIONS if not k.startswith("ao_int4")]
every = functools.partial(pytest.mark.parametrize, "selection")
ALL = [p.values[0] for p in each(**dict.fromkeys(SELECTIONS))]


def marked(keys: list[str]) -> list[Any]:
    return [
        pytest.param(p.values[0], marks=p.marks, id=p.values[0])
        for p in each(**dict.fromkeys(keys))
    ]


@pytest.mark.parametrize(
    ("selection", "linear"),
    each(
        int8=LINEAR + 4 * SCALED_ROWS,
        nf4=LINEAR // 2 + LINEAR // 64 * 4 + 56 * 64,
        fp4=LINEAR // 2 + LINEAR // 64 * 4 + 56 * 64,
        nested=LINEAR // 2 + LINEAR // 64 + 8 * 112 + 56 * (1024 + 4 + 64),
        ao_int8=LINEAR + 5 * SCALED_ROWS,
        ao_groups=LINEAR + 5 * (LINEAR // 64),
        ao_dynamic=LINEAR + 5 * SCALED_ROWS,
        ao_int4=LINEAR // 2 + 8 * (LINEAR // 32),
        ao_int4_wide=LINEAR // 2 + 8 * (LINEAR // 64),
    ),
)
@pytest.mark.one_in(4)
def test_bytes_are_planned_from_the_config_and_met(selection: str, linear: int) -> None:
    planned = jackfield.plan("demo", quantization=selection).requirements.weight_bytes
    assert planned == REST + linear
    with jackfield.load("demo", quantization=selection) as engine:
        assert loaded_bytes(engine.model, engine.plan["quantizer"].registered) == planned
        assert "56 of 57 linear layers" in str(engine.report())


@every(marked(["int8", "nf4", "ao_int8", "ao_dynamic"]))
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral", "gpt-oss", "gemma2"])
@pytest.mark.one_in(4)
def test_bytes_of_other_families(selection: str, family: str, tmp_path: Path) -> None:
    """Biases, Conv1D, experts, tied and untied heads, float16."""
    from families import build

    build(family, torch.float32).save_pretrained(tmp_path)
    if family == "gpt2" and selection.startswith("torchao"):
        with pytest.raises(PlanError, match=r"converts nn.Linear, and GPT2LMHeadModel has none"):
            jackfield.load(tmp_path, quantization=selection)
        return
    for dtype in ("float32", "bfloat16"):
        with jackfield.load(tmp_path, quantization=selection, dtype=dtype) as engine:
            planned = engine.plan.requirements.weight_bytes
            assert loaded_bytes(engine.model, engine.plan["quantizer"].registered) == planned
            assert len(engine.generate([[1, 2, 3], [4]], max_new_tokens=3)) == 2


@pytest.mark.parametrize(
    "key",
    [
        *["int8", "nf4", "fp4", "nested", "ao_int8", "ao_dynamic"],
        pytest.param("ao_int4", marks=needs_torchao),
        "int4-cpu",
    ],
)
@pytest.mark.one_in(4)
def test_answers_are_within_two_points_of_full_precision(key: str) -> None:
    if key != "int4-cpu":
        extras.needs("torchao" if key.startswith("ao") else "bitsandbytes")
    dtype = "bfloat16" if "int4" in key else "float32"  # in float32 torchao's kernel is slow
    with jackfield.load("demo", quantization=SELECTIONS.get(key, key), dtype=dtype) as engine:
        assert evaluate(engine, count=20).accuracy >= full_precision() - 0.02


@functools.cache
def full_precision() -> float:
    with jackfield.load("demo", dtype="float32") as engine:
        found = evaluate(engine, count=20).accuracy
    assert found > 0.9
    return found


ATTENTIONS = ("eager", "sdpa", "cpu_decode")
CACHES = ("dynamic", "static", "paged")
of_the_library = every(
    [*marked(["int8", "nf4", "fp4", "ao_int8", "ao_dynamic", "ao_int4"]), "int4-cpu"]
)


@of_the_library
@pytest.mark.one_in(4)
def test_each_attention_and_cache_says_what_transformers_says(selection: str) -> None:
    """Ragged, and more requests than run together, so that they join while others run."""
    assert_same(
        selection, [chosen_with(selection, *pair) for pair in zip(ATTENTIONS, CACHES, strict=True)]
    )


@pytest.mark.long
@of_the_library
def test_every_attention_and_cache_says_what_transformers_says(selection: str) -> None:
    every_pair = itertools.product(ATTENTIONS, CACHES)
    made = [one for pair in every_pair if plans(one := chosen_with(selection, *pair))]
    assert len(made) >= 6
    assert_same(selection, made)


def chosen_with(selection: str, attention: str, cache: str) -> dict[str, Any]:
    return {
        "attn_implementation": attention,
        "cache_implementation": cache,
        "quantization": selection,
        "dtype": "bfloat16" if selection in (INT4, "int4-cpu") else "float32",
    }


def assert_same(selection: str, made: list[dict[str, Any]]) -> None:
    for chosen in made:
        with jackfield.load("demo", max_batch_size=3, **chosen) as engine:
            found = tokens_of(engine)
        assert not follows(found, oracle(selection, chosen["dtype"])), chosen


def plans(chosen: dict[str, Any]) -> bool:
    try:
        jackfield.plan("demo", **chosen)
    except PlanError:
        return False
    return True


@every(marked(["int8", "nf4", "ao_int8", "ao_dynamic", "ao_int4"]))
def test_deterministic_is_refused(selection: str) -> None:
    with pytest.raises(PlanError, match="not batch-invariant"):
        jackfield.plan("demo", quantization=selection, deterministic=True)


@every(marked(SAVED))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.one_in(4)
def test_saved_and_read_again_it_is_the_same(selection: str, dtype: str, tmp_path: Path) -> None:
    with jackfield.load("demo", quantization=selection, dtype=dtype) as engine:
        tokens = tokens_of(engine)  # before it is saved, since a step may repack weights
        engine.model.save_pretrained(tmp_path)
        engine.tokenizer.save_pretrained(tmp_path)
        state = {name: part.clone() for name, part in engine.model.state_dict().items()}
    named = selection.partition("?")[0]
    with jackfield.load(tmp_path) as engine:
        assert engine.plan["quantizer"].registered.name == named
        assert engine.plan["quantizer"].how == "auto"
        assert (
            loaded_bytes(engine.model, engine.plan["quantizer"].registered)
            == engine.plan.requirements.weight_bytes
        )
        again = engine.model.state_dict()
        assert state.keys() == again.keys()
        assert all(same(state[name], again[name]) for name in state)
        assert tokens_of(engine) == tokens
    with jackfield.load(tmp_path, quantization=named) as engine:
        assert tokens_of(engine) == tokens
    for other in {"bnb-8bit", "bnb-4bit", "torchao", "none"} - {named}:
        with pytest.raises(PlanError, match=r"is quantized"):
            jackfield.load(tmp_path, quantization=other)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, also where a tensor is made of others."""
    if hasattr(one, "__tensor_flatten__"):
        names = one.__tensor_flatten__()[0]
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    return one.dtype == other.dtype and torch.equal(one, other)


@needs_torchao
def test_what_is_packed_for_a_processor_is_not_saved(tmp_path: Path) -> None:
    with (
        jackfield.load("demo", quantization=INT4, dtype="bfloat16") as engine,
        pytest.raises(ValueError, match="Int4OpaqueTensor"),
    ):
        engine.model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@needs_bnb
def test_options_beside_a_quantized_checkpoint_are_refused(tmp_path: Path) -> None:
    with jackfield.load("demo", quantization="bnb-4bit") as engine:
        engine.model.save_pretrained(tmp_path)
    for selection in ("bnb-4bit?type=fp4", jackfield.quantization("bnb-4bit")):
        with pytest.raises(PlanError, match="quantized already"):
            jackfield.load(tmp_path, quantization=selection)


@every(marked(["int8", "nf4", "ao_int8"]))
def test_a_config_that_claims_what_its_weights_are_not(selection: str, tmp_path: Path) -> None:
    """It would be loaded as it is, and every layer be taken for a quantized one."""
    shutil.copytree(MODEL_PATH, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = jackfield.quantization(selection).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config, default=lambda value: value.value))
    with pytest.raises(CheckpointError, match=r"its config says that .* quantized it"):
        jackfield.load(tmp_path)


@every(marked(["int8", "nf4"]))
@pytest.mark.parametrize("act", [jackfield.plan, jackfield.load])
def test_a_checkpoint_that_would_be_left_whole_is_told_as_the_file_s_fault(
    selection: str, act: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU; where a GPU computes, bitsandbytes reads it."""
    shutil.copytree(MODEL_PATH, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    stored = jackfield.quantization(selection).to_dict()
    config["quantization_config"] = stored | {"llm_int8_enable_fp32_cpu_offload": True}
    (tmp_path / "config.json").write_text(json.dumps(config, default=lambda value: value.value))
    told = r"in the config.json of .*: llm_int8_enable_fp32_cpu_offload is True, which leaves"
    with pytest.raises(CheckpointError, match=told):
        act(tmp_path, device_map="cpu")
    FakeCuda([Gpu()]).install(monkeypatch)
    plan = jackfield.plan(tmp_path, device_map="cuda")
    assert plan["quantizer"].registered.name == selection.partition("?")[0]


@every(marked(["nf4", "ao_int8"]))
def test_live_models(selection: str) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    with pytest.raises(PlanError, match="this model is loaded; give its folder"):
        jackfield.load(plain, quantization=selection)
    config = jackfield.quantization(f"plugin:{selection}")
    live = AutoModelForCausalLM.from_pretrained(MODEL_PATH, quantization_config=config)
    with jackfield.load(live) as engine:
        assert engine.plan["quantizer"].registered.name == selection.partition("?")[0]
        assert len(engine.generate([1, 2], max_new_tokens=2)[0].token_ids) == 2


@every(marked(["int8", "nf4", "ao_int8"]))
@pytest.mark.parametrize("dtype", ["float64"])
def test_dtypes(selection: str, dtype: str) -> None:
    with pytest.raises(PlanError, match="does not run with dtype float64"):
        jackfield.plan("demo", quantization=selection, dtype=dtype)


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ("bnb-8bit?threshold=-1", "threshold must be 0 or more"),
        ("bnb-8bit?threshold=nan", "threshold must be 0 or more"),
        ("bnb-4bit?type=int4", "must be one of nf4, fp4"),
        ("bnb-4bit?compute_dtype=float64", "must be one of bfloat16, float16, float32"),
        ("torchao?type=int2", "must be one of int8-weight-only, int4-weight-only, int8-dynamic"),
        ("torchao?type=int8-dynamic&group_size=32", "one scale a row"),
        ("torchao?group_size=0", "at least 1"),
        (f"{INT4}&group_size=48", "one of 32, 64, 128, 256, not 48"),
        ("gptq?bits=5", "must be one of 2, 3, 4, 8"),
        ("gptq?group_size=100", "group_size must be -1, 16, 32"),
        ("gptq?damp_percent=1", "between 0 and 1"),
        ("gptq?samples=0", "at least 1"),
        ("gptq?calibration=/nowhere.txt", "is not a file"),
    ],
)
def test_options_are_checked(selection: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        jackfield.plan("demo", quantization=selection)


@pytest.mark.parametrize(
    ("selection", "family", "says"),
    [
        (f"{INT4}&group_size=128", "demo", "128 do not divide 192 columns of model.layers.0"),
        (f"{INT4}&group_size=256", "demo", "int4 on cpu has groups of 32, 64, 128, not of 256"),
        (INT4, "llama", "do not divide 48 columns"),
        ("torchao?group_size=5", "llama", "5 do not divide 32 columns .* write 'group_size=1'"),
    ],
)
@needs_torchao
def test_shapes_that_do_not_fit_are_refused(selection: str, family: str, says: str) -> None:
    model: Any = "demo" if family == "demo" else config_of(family)
    with pytest.raises(PlanError, match=says):
        jackfield.plan(model, quantization=selection)


@pytest.mark.parametrize(
    ("selection", "family", "says"),
    [
        pytest.param("bnb-8bit", "falcon-alibi", "converts nn.Linear and Conv1D", marks=needs_bnb),
        pytest.param("bnb-4bit", "falcon-alibi", "converts nn.Linear and Conv1D", marks=needs_bnb),
        ("int4-cpu", "falcon-alibi", "converts nn.Linear and Conv1D"),
        ("int4-cpu?group_size=64", "llama", "groups of 64 divide the inputs of no linear layer"),
    ],
)
def test_a_model_of_which_nothing_would_be_converted_is_refused_before_weights(
    selection: str, family: str, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        jackfield.plan(config_of(family), quantization=selection)


@pytest.mark.parametrize(
    ("selection", "library", "extra"),
    [
        ("bnb-8bit", "bitsandbytes", "bnb"),
        ("bnb-4bit", "accelerate", "bnb"),
        ("torchao", "torchao", "torchao"),
        ("gptq", "gptqmodel", "gptq"),
    ],
)
def test_a_missing_library_names_its_extra(
    selection: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == library else found(name, *rest)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", hidden)
    with pytest.raises(PlanError, match=rf"{library}.* pip install 'jackfield\[{extra}\]'"):
        jackfield.load("demo", quantization=selection)
    with pytest.raises(PlanError, match=library):
        jackfield.quantization(selection)

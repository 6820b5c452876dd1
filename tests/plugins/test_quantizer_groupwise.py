"""``int4-cpu`` and ``int8-cpu`` as backends: planned, loaded, saved, read again, refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import build
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import jackfield
from jackfield.bridge.footprint import loaded_bytes
from jackfield.demo import MODEL_PATH
from jackfield.errors import JackfieldError
from jackfield_plugins.quantizer.groupwise.linear import GroupwiseLinear
from jackfield_plugins.quantizer.groupwise.quantize import quantize

if TYPE_CHECKING:
    from forking import Forks

QUESTION = [{"role": "user", "content": "Sort these numbers: 41 7 88 23"}]
KERNELS = ["native", "torch"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, quantized and saved."""
    folder = tmp_path_factory.mktemp("int4")
    with jackfield.load("demo", quantization="int4-cpu") as engine:
        engine.model.save_pretrained(folder)
        engine.tokenizer.save_pretrained(folder)
    return folder


def edited(saved: Path, folder: Path, **changes: Any) -> Path:
    """A copy of `saved` with another `quantization_config`."""
    shutil.copytree(saved, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(folder: str | Path, **selected: Any) -> str:
    with pytest.raises(JackfieldError) as caught:
        jackfield.load(folder, **selected)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.one_in(4)
def test_bytes_are_planned_exactly(kernel: str, group_size: int) -> None:
    selected = f"int4-cpu?kernel={kernel}&group_size={group_size}"
    with jackfield.load("demo", quantization=selected) as engine:
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        assert engine.plan.requirements.dtype == "bfloat16"
        (answer,) = engine.generate(QUESTION)
        assert answer.text == "7 23 41 88"
        assert answer.report["quantizer"].source == "56 of 57 linear layers"


def test_a_saved_model_is_read_as_it_was(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    with jackfield.load("demo", quantization="int4-cpu") as engine:
        expected = engine.generate(QUESTION, logprobs=2)[0]
    for kernel in (None, *KERNELS):
        named = {} if kernel is None else {"quantization": f"int4-cpu?kernel={kernel}"}
        with jackfield.load(saved, **named) as engine:
            assert engine.plan["quantizer"].registered.name == "int4-cpu"
            found = engine.model.state_dict()
            assert all(torch.equal(found[name], state[name]) for name in state)
            answer = engine.generate(QUESTION, logprobs=2)[0]
            assert answer.token_ids == expected.token_ids
            if kernel != "torch":
                assert answer.logprobs == expected.logprobs
    assert (saved / "config.json").read_text().count("native") == 0


def test_plain_transformers_code(saved: Path) -> None:
    config: Any = jackfield.quantization("plugin:int4-cpu?group_size=32")
    made = AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, quantization_config=config, dtype=torch.bfloat16
    )
    read = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    assert sum(isinstance(m, GroupwiseLinear) for m in made.modules()) == 56
    with torch.no_grad():
        assert torch.equal(made(ids).logits, read(ids).logits)
    with pytest.raises(ValueError, match="bfloat16"):
        AutoModelForCausalLM.from_pretrained(
            MODEL_PATH, quantization_config=config, dtype="float32"
        )


def test_every_family_of_linear_layers(tmp_path: Path) -> None:
    """Biases, layers that do not divide into groups, and experts."""
    for family in ("qwen2", "gpt2", "gpt-neox", "mixtral", "gemma3"):
        folder = tmp_path / family
        build(family, torch.float32).save_pretrained(folder)
        with jackfield.load(folder, quantization="int4-cpu", max_batch_size=4) as engine:
            assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model), family
            found = engine.generate([[5, 6, 7], [9] * 12], max_new_tokens=4)
            assert [len(c.token_ids) for c in found] == [4, 4]


def test_refusals(saved: Path, tmp_path: Path) -> None:
    assert "does not run with dtype float32" in refusal(
        "demo", quantization="int4-cpu", dtype="float32"
    )
    assert "does not run with dtype float32" in refusal(saved, dtype="float32")
    assert "the checkpoint has group_size=32, not 64" in refusal(
        saved, quantization="int4-cpu?group_size=64"
    )
    assert "quantized with int4-cpu" in refusal(saved, quantization="none")
    assert "must be one of 32, 64, 128" in refusal("demo", quantization="int4-cpu?group_size=48")
    model = build("llama", torch.bfloat16)
    assert "is loaded; give its folder" in refusal(model, quantization="int4-cpu")
    wrong = edited(saved, tmp_path / "wrong", group_size=64)
    assert "its config says group_size=64 and head=None: " in refusal(wrong)
    broken = edited(saved, tmp_path / "broken")
    state = load_file(broken / "model.safetensors")
    name = next(name for name in state if name.endswith("scales"))
    del state[name]
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    assert f"there is no {name}, which has to be" in refusal(broken)


@pytest.mark.long
def test_loading_holds_little_more_than_the_quantized_model(tmp_path: Path, forks: Forks) -> None:
    """In a process of its own, against the same without weights: what remains is the checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, vocab_size=1000,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    drawn = torch.randn(4096).to(torch.bfloat16) / 32
    for parameter in model.parameters():  # drawing all of them takes longer than reading them
        parameter.data.copy_(drawn[: parameter.shape[-1]])
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    del model
    code = f"""
import re, jackfield, jackfield.engine.engine, transformers
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
jackfield.load("demo", quantization="int4-cpu", cache_implementation="dynamic").close()
before = most()
jackfield.load({str(tmp_path)!r}, quantization="int4-cpu", cache_implementation="dynamic")
print(most() - before)
"""
    done = forks.python("-c", code)
    assert done.returncode == 0, done.stderr
    peak = int(re.findall(r"\d+", done.stdout)[-1])
    assert peak < 0.6 * size, (peak, size)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_head_can_be_stored_as_well(bits: int, tmp_path: Path) -> None:
    """Tied (the demo model), and untied (a random one); planned, saved, and read as it was."""
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "untied")
    build("gpt-neox", torch.bfloat16).save_pretrained(tmp_path / "other-name")
    for number, model in enumerate(("demo", tmp_path / "untied", tmp_path / "other-name")):
        with jackfield.load(model, quantization=f"int4-cpu?head={bits}") as engine:
            assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
            head = engine.model.get_output_embeddings()
            assert isinstance(head, GroupwiseLinear)
            assert head.bits == bits
            expected = engine.generate([[5, 6, 7, 8]], max_new_tokens=12)[0]
            engine.model.save_pretrained(tmp_path / f"saved-{number}")
        with jackfield.load(tmp_path / f"saved-{number}") as engine:
            assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
            assert (
                engine.generate([[5, 6, 7, 8]], max_new_tokens=12)[0].token_ids
                == expected.token_ids
            )
        assert f"head={bits}, not {12 - bits}" in refusal(
            tmp_path / f"saved-{number}", quantization=f"int4-cpu?head={12 - bits}"
        )
    assert "torch's kernel has no weights of 8 bits" in refusal(
        "demo", quantization="int4-cpu?head=8&kernel=torch"
    )


def test_deterministic_on_its_own_kernel_alone() -> None:
    with jackfield.load("demo", quantization="int4-cpu", deterministic=True) as engine:
        together = engine.generate([QUESTION] * 3, max_new_tokens=8, logprobs=1)
        alone = engine.generate(QUESTION, max_new_tokens=8, logprobs=1)[0]
    assert all(c.logprobs == alone.logprobs for c in together)
    assert "on its own kernel only" in refusal(
        "demo", quantization="int4-cpu?kernel=torch", deterministic=True
    )


def test_plain_transformers_code_stores_the_head_too() -> None:
    config: Any = jackfield.quantization("plugin:int4-cpu?head=8")
    model = AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, quantization_config=config, dtype=torch.bfloat16
    )
    assert model.get_output_embeddings().bits == 8


def test_weights_that_a_checkpoint_keeps_as_one(tmp_path: Path) -> None:
    model = build("hrm-text", torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    keys = load_file(tmp_path / "whole" / "model.safetensors")
    assert any(key.endswith("attn.gqkv_proj.weight") for key in keys)
    said = []
    for source in (tmp_path / "whole", tmp_path / "quantized"):
        named = {"quantization": "int4-cpu"} if source.name == "whole" else {}
        with jackfield.load(source, cache_implementation="dynamic", **named) as engine:
            for path, layer in engine.model.named_modules():
                if isinstance(layer, GroupwiseLinear):
                    expected = quantize(model.get_submodule(path).weight)
                    assert all(map(torch.equal, layer.quantized(), expected)), path
            said.append(engine.generate([5, 6, 7], max_new_tokens=8)[0].token_ids)
            assert "28 of 33" in engine.report()["quantizer"].source
            engine.model.save_pretrained(tmp_path / "quantized")
    assert said[0] == said[1]


def test_what_was_read_is_saved_again(saved: Path, tmp_path: Path) -> None:
    with jackfield.load(saved) as engine:
        engine.model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (saved, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("dtype", "options"), [("float32", ""), ("bfloat16", "?group_size=64&head=8")]
)
def test_eight_bits(dtype: str, options: str, tmp_path: Path) -> None:
    """Planned to the byte, right, saved and read as it was: in the dtype that the model has."""
    with jackfield.load("demo", quantization=f"int8-cpu{options}", dtype=dtype) as engine:
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        assert str(engine.model.dtype) == f"torch.{dtype}"
        (expected,) = engine.generate(QUESTION, logprobs=2)
        assert expected.text == "7 23 41 88"
        assert expected.report["quantizer"].source.startswith("57" if options else "56")
        engine.model.save_pretrained(tmp_path)
        engine.tokenizer.save_pretrained(tmp_path)
        state = engine.model.state_dict()
    with jackfield.load(tmp_path) as engine:
        assert engine.plan["quantizer"].registered.name == "int8-cpu"
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        assert all(torch.equal(state[n], found) for n, found in engine.model.state_dict().items())
        (answer,) = engine.generate(QUESTION, logprobs=2)
    assert answer.token_ids == expected.token_ids
    for found, wanted in zip(answer.logprobs, expected.logprobs, strict=True):
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)  # MKL's bits vary


def test_eight_bits_in_native_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield_plugins.compiler.native import kept
    from jackfield_plugins.native import keeping

    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))
    found = {}
    for compiler in ("none", "native"):
        selected = {"quantization": "int8-cpu?head=8", "dtype": "float32", "compile": compiler}
        with jackfield.load("demo", cache_implementation="paged", **selected) as engine:
            found[compiler] = engine.generate(QUESTION)[0].token_ids
            seen = engine.report()["compiler"]
    assert found["native"] == found["none"]
    assert seen.calls
    assert "in Python" not in seen.source


def test_refusals_of_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not run with dtype float16" in refusal(
        "demo", quantization="int8-cpu", dtype="float16"
    )
    assert "must be one of 8, not '4'" in refusal("demo", quantization="int8-cpu?head=4")
    with jackfield.load("demo", quantization="int8-cpu") as engine:
        engine.model.save_pretrained(tmp_path / "eight")
    assert "quantized already, with int8-cpu" in refusal(
        tmp_path / "eight", quantization="int4-cpu"
    )
    config = json.loads((tmp_path / "eight" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "int4-cpu"
    (tmp_path / "eight" / "config.json").write_text(json.dumps(config))
    assert "its config says group_size=32 and head=None: " in refusal(tmp_path / "eight")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs a C++ compiler" in refusal("demo", quantization="int8-cpu")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_stored_model_runs_on_the_kernel_that_is_named(kernel: str, saved: Path) -> None:
    with jackfield.load(saved, quantization=f"int4-cpu?kernel={kernel}") as engine:
        layers = [m for m in engine.model.modules() if isinstance(m, GroupwiseLinear)]
        assert {layer.product.name for layer in layers} == {kernel}
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        assert engine.generate([QUESTION])[0].text == "7 23 41 88"

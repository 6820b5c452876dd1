"""``gguf`` as a backend: files with blocks planned, loaded, run, and refused."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import config_of, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import jackfield
from jackfield.bridge.footprint import loaded_bytes
from jackfield.bridge.gguf_header import read_header
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, JackfieldError, UsageError
from jackfield.estimates.evaluation import evaluate
from jackfield_plugins.native import NativeKernel
from jackfield_plugins.quantizer.gguf.layers import GgufEmbedding, GgufLinear
from jackfield_plugins.quantizer.gguf.native import BLOCKS, KERNELS

pytest.importorskip("gguf", reason="needs jackfield[gguf]")
from gguf_files import Type, export, sometimes

if TYPE_CHECKING:
    from command_line import Cli

pytestmark = pytest.mark.skipif(
    bool(KERNELS["Q4_0"].cannot_build()), reason="needs a C++ compiler, on Linux"
)
QUESTION = [{"role": "user", "content": "Sort these numbers: 41 7 88 23"}]


def model_of(family: str, **fields: Any) -> Any:
    """A small one that a GGUF file can tell of, wide enough for blocks of 256."""
    config = config_of(family)
    config.hidden_size = config.n_embd = 256
    config.intermediate_size = 512
    config.tie_word_embeddings = family in ("gemma2", "gemma3", "qwen2")
    if family == "qwen2":
        config.use_sliding_window, config.layer_types = False, ["full_attention"] * 2
    if family == "gemma3":
        config.layer_types = ["sliding_attention"] * 2
    if getattr(config, "head_dim", None):
        config.head_dim = 64
    for name, value in fields.items():
        setattr(config, name, value)
    config.initializer_range = 0.08
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    return export(model, path, Type.Q4_0, tokenizer)


def mixed(name: str) -> Type:
    """As llama-quantize mixes types in one file."""
    if name == "token_embd.weight":
        return Type.Q6_K
    return Type.Q6_K if ".ffn_down." in name or ".attn_v." in name else Type.Q4_K


INT8 = "gguf?activations=int8"

#: What files are stored as, by a name.
KINDS: dict[str, Any] = {
    **{kind: Type[kind] for kind in BLOCKS},
    "mixed": mixed,
    "a type that is unpacked": lambda name: Type.Q8_0 if "attn" in name else Type.TQ2_0,
}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def transformers_own(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


@pytest.mark.parametrize("kind", sometimes(KINDS))
def test_blocks_are_what_transformers_unpacks(kind: str, tmp_path: Path) -> None:
    path = export(model_of("llama"), tmp_path / "model.gguf", KINDS[kind])
    ids = torch.arange(3, 40)[None]
    wanted = logits(transformers_own(path), ids)
    plain = {"cache_implementation": "dynamic", "dtype": "float32"}
    with jackfield.load(path, **plain) as engine:
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        found = logits(engine.model, ids)
        assert any(isinstance(m, GgufLinear) for m in engine.model.modules())
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    with jackfield.load(path, quantization="gguf?kernel=none", **plain) as engine:
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        assert torch.equal(logits(engine.model, ids), wanted)


@pytest.mark.parametrize("family", ["llama-mqa", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"])
@pytest.mark.one_in(4)
def test_families(family: str, tmp_path: Path) -> None:
    """Rows that were moved, heads that are tied, embeddings with a scale, transposed matrices."""
    path = export(model_of(family), tmp_path / "model.gguf", mixed)
    ids = torch.arange(3, 40)[None]
    with jackfield.load(path, cache_implementation="dynamic", dtype="float32") as engine:
        found, model = logits(engine.model, ids), engine.model
        kept = [m for m in model.modules() if isinstance(m, GgufLinear | GgufEmbedding)]
        stored = engine.plan.requirements.stored["tensors"]
        assert len(kept) == len(stored) + bool(model.config.tie_word_embeddings)
        assert engine.plan.requirements.weight_bytes == loaded_bytes(model)
    with jackfield.load(path, quantization="gguf?kernel=none", dtype="float32",
                        cache_implementation="dynamic") as engine:  # fmt: skip
        wanted = logits(engine.model, ids)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    with jackfield.load(path) as engine:  # in bfloat16, through its own cache and attention
        texts = engine.generate(prompts((3, 17, 40)), max_new_tokens=5)
        assert [len(c.token_ids) for c in texts] == [5, 5, 5]


def test_the_demo_answers(demo: Path) -> None:
    with jackfield.load(demo, deterministic=True) as engine:
        assert engine.plan["quantizer"].registered.name == "gguf"
        assert engine.plan.requirements.dtype == "bfloat16"
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model)
        (answer,) = engine.generate([QUESTION])
        assert answer.text == "7 23 41 88"
        assert answer.report["quantizer"].source == "58 of 58 linear layers, in Q4_0"
        head, embedding = engine.model.get_output_embeddings(), engine.model.get_input_embeddings()
        assert head.weight is embedding.weight
        with pytest.raises(ValueError, match="gguf-blocks"):
            engine.model.save_pretrained(demo.parent / "saved")


def test_the_demo_answers_with_activations_of_8_bits(demo: Path) -> None:
    with jackfield.load(demo, quantization=INT8, deterministic=True) as engine:
        (answer,) = engine.generate([QUESTION])
        assert answer.text == "7 23 41 88"
        told = answer.report["quantizer"].source
        assert told == "58 of 58 linear layers, 1 in Q4_0, 57 in Q4_0 with int8 activations"
        right = evaluate(engine, count=20).accuracy
        live = copy.deepcopy(engine.model)
    with pytest.raises(JackfieldError, match="when weights are read, not of a live model"):
        jackfield.load(live, quantization="gguf?activations=dtype")
    assert jackfield.plan(live)["quantizer"].options.activations is None
    with jackfield.load(demo) as engine:
        assert right >= evaluate(engine, count=20).accuracy - 0.05


@pytest.mark.long
def test_compiled_steps_say_the_same(demo: Path) -> None:
    with jackfield.load(demo) as engine:
        (wanted,) = engine.generate([QUESTION])
    with jackfield.load(demo, compile="inductor") as engine:
        (found,) = engine.generate([QUESTION])
    assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)


@pytest.mark.parametrize(("family", "quantization"), [
    ("qwen2", "gguf"), ("qwen2", INT8), ("gemma3", "gguf"),
])  # fmt: skip
def test_native_steps_say_the_same(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers, head and embedding are functions in C within a native step, which is kept for
    other processes: an embedding that is scaled has no tensor for it.
    """
    from jackfield_plugins.compiler.native import kept
    from jackfield_plugins.native import keeping

    monkeypatch.setattr(kept, "cache_root", lambda: keeping.own_folder(tmp_path / "cache"))
    path = export(model_of(family), tmp_path / "model.gguf", mixed)
    texts, found = prompts((3, 17, 40)), {}
    for compiler in ("none", "native"):
        with jackfield.load(path, quantization=quantization, compile=compiler) as engine:
            found[compiler] = [c.token_ids for c in engine.generate(texts, max_new_tokens=12)]
            seen = engine.report()["compiler"]
    assert found["native"] == found["none"]
    assert "in Python" not in seen.source
    assert seen.calls
    assert seen.compiled.kept == seen.compiled.graphs > 0


def test_a_draft_model_in_a_file(demo: Path) -> None:
    with jackfield.load("demo", decoding="assisted", assistant_model=str(demo)) as engine:
        assert engine.generate([QUESTION])[0].text == "7 23 41 88"


def refusal(path: Path, **selected: Any) -> str:
    with pytest.raises(JackfieldError) as caught:
        jackfield.load(path, **selected)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("named", ["gguf?kernel=native", INT8])
def test_kernels_of_the_types_of_a_file_are_compiled(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others: each takes a compiler a quarter of a minute."""
    asked: list[str] = []

    def cannot_load(kernel: NativeKernel) -> list[str]:
        asked.append(kernel.name)
        return ["is broken"] if kernel.name.endswith("Q6_K") else []

    path = export(model_of("llama"), tmp_path / "model.gguf", KINDS["mixed"])
    monkeypatch.setattr(NativeKernel, "cannot_load", cannot_load)
    assert "is broken" in refusal(path, quantization=named)
    ours = {name for name in asked if name.startswith("gguf")}
    assert {name.rpartition("-")[2] for name in ours} == {"Q4_K", "Q6_K"}


def test_refusals(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quantized with gguf-blocks" in refusal(demo, quantization="none")
    assert "quantized already, with gguf-blocks" in refusal(demo, quantization="int4-cpu")
    assert "reads quantized checkpoints" in refusal("demo", quantization="gguf")
    assert "float16" in refusal(demo, quantization="gguf?kernel=native", dtype="float16")
    assert "kernel" in refusal(demo, quantization="gguf?kernel=metal")
    assert "float16" in refusal(demo, quantization=INT8, dtype="float16")
    assert "which kernel=none unpacks" in refusal(demo, quantization=f"{INT8}&kernel=none")
    assert "activations" in refusal(demo, quantization="gguf?activations=int4")
    with pytest.raises(UsageError, match="quantizes nothing; leave quantization_config out"):
        jackfield.quantization("plugin:gguf")
    plan = jackfield.plan(demo, quantization="gguf?kernel=native")
    choice, needs = plan["quantizer"], replace(plan.requirements, device="cuda")
    (reason,) = choice.registered.backend.refuse(needs, choice.options)
    assert reason == "keeps blocks on the CPU, not on cuda"
    (reason,) = choice.registered.backend.refuse(
        replace(plan.requirements, adapter="LORA"), choice.options
    )
    assert reason == "takes no LORA adapter on top (adapters)"
    monkeypatch.setenv("CXX", "no-such-compiler")
    for named in ("gguf?kernel=native", INT8):
        assert "needs a C++ compiler" in refusal(demo, quantization=named)


def test_without_a_compiler_weights_are_unpacked(
    demo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    caplog.set_level(logging.WARNING, "jackfield")
    with jackfield.load(demo) as engine:
        assert engine.generate([QUESTION])[0].text == "7 23 41 88"
        assert engine.plan.requirements.weight_bytes == loaded_bytes(engine.model) == 6789504
    assert "gguf unpacks all weights (needs a C++ compiler" in caplog.text


def test_half_precision_is_unpacked(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jackfield.load(demo, dtype="float16") as engine:
        assert engine.model.dtype is torch.float16
    assert "computes with blocks in bfloat16 or float32, not in float16" in caplog.text


def test_explain_and_memory(demo: Path, cli: Cli) -> None:
    done = cli("explain", str(demo), "--json")
    assert done.json["plan"]["chosen"]["quantizer"]["name"] == "gguf"
    done = cli("memory", str(demo), "--json")
    assert done.code == 0, done.err


def test_blocks_of_an_unknown_type(demo: Path, tmp_path: Path, cli: Cli) -> None:
    """Each tensor's type, one after another, is one that nobody knows, or that nobody unpacks."""
    whole = demo.read_bytes()
    tensors = read_header(demo).tensors
    for name in [name for name in tensors if tensors[name].type == "Q4_0"][::9]:
        text = name.encode()
        place = whole.index(len(text).to_bytes(8, "little") + text) + 8 + len(text)
        place += 4 + 8 * int.from_bytes(whole[place : place + 4], "little")
        for kind, wanted in ((77, "is of type 77, which nobody here knows"), (0, "")):
            broken = tmp_path / "broken.gguf"
            broken.write_bytes(whole[:place] + kind.to_bytes(4, "little") + whole[place + 4 :])
            said = refusal(broken)
            assert wanted in said or "is not a whole GGUF file" in said
    cli("generate", "hi", "--model", str(broken)).assert_failed(2, str(broken))


def test_a_scale_that_is_no_number(demo: Path, tmp_path: Path) -> None:
    start = read_header(demo).tensors["blk.3.ffn_up.weight"].start
    whole = bytearray(demo.read_bytes())
    whole[start : start + 2] = b"\xff\x7f"
    (tmp_path / "nan.gguf").write_bytes(whole)
    assert "model.layers.3.mlp.up_proj" in refusal(tmp_path / "nan.gguf")


def test_a_file_that_is_cut_off_while_it_is_read(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo.read_bytes())
    plan = jackfield.plan(path)
    assert plan["quantizer"].registered.name == "gguf"
    from jackfield.bridge import weights as loading

    real = loading.tensors_in

    def cut(source: Any) -> Any:
        found = real(source)
        path.write_bytes(demo.read_bytes()[: path.stat().st_size // 2])
        return found

    monkeypatch.setattr(loading, "tensors_in", cut)
    with pytest.raises(CheckpointError, match="was cut off while it was read"):
        jackfield.load(path)


def test_odd_fields_of_a_config(demo: Path) -> None:
    config = jackfield.load(demo).model.config
    stored = json.loads(json.dumps(config.to_dict()["quantization_config"]))
    assert set(stored) == {"quant_method", "tensors"}
    for odd in (None, [], {"a": 3}, {"a": ["Q4_0", 3]}, {"a": ["Q4_0", 0, 32]}):
        config.quantization_config = {**stored, "tensors": odd}
        with pytest.raises(JackfieldError, match="tensors is"):
            jackfield.plan(config)

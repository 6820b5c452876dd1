"""A LoRA on weights that are stored in any way: alone, and as one of several in one batch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import COUNT, Expected, follows, said
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import jackfield
from jackfield.bridge.adapters import hushed
from jackfield.demo import MODEL_PATH
from jackfield.errors import PlanError, SettingsError

peft = pytest.importorskip("peft", reason="needs jackfield[peft]")

PROMPTS = ["Once upon a time", "Sort these numbers: 41 7 88 23", "3 + 4 ="]
ALPHA, RANK = 24, 8
LIBRARY = {"bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes", "torchao": "torchao",
           "hqq": "hqq", "quanto": "optimum"}  # fmt: skip
QUANTIZERS = ["none", "int4-cpu", "int8-cpu", "bnb-8bit", "bnb-4bit", "torchao"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, name in enumerate("ab"):
        path = found[name] = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(), hushed():
            torch.manual_seed(seed)
            config = peft.LoraConfig(
                r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", init_lora_weights=False,
                target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
            )  # fmt: skip
            model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
            peft.get_peft_model(model, config).save_pretrained(path)
    return found


def beside(model: Any, path: Path) -> list[Any]:
    """Have the layers of `model` add what an adapter says, in the plainest way; returns hooks."""
    state = load_file(path / "adapter_model.safetensors")

    def adding(key: str) -> Any:
        a, b = state[f"{key}.lora_A.weight"], state[f"{key}.lora_B.weight"]

        def add(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            given = args[0]
            inner = given @ a.to(given.dtype).T
            return output + inner @ (b * (ALPHA / RANK)).to(given.dtype).T

        return add

    keys = [key.removesuffix(".lora_A.weight") for key in state if ".lora_A." in key]
    assert keys
    return [
        model.get_submodule(key.removeprefix("base_model.model.")).register_forward_hook(
            adding(key)
        )
        for key in keys
    ]


def right(engine: jackfield.Engine, path: Path | None) -> list[Expected]:
    """What transformers says with the same stored weights, and an adapter beside them."""
    hooks = [] if path is None else beside(engine.model, path)
    try:
        return [said(engine.model, engine.tokenizer(text).input_ids) for text in PROMPTS]
    finally:
        for hook in hooks:
            hook.remove()


def tokens(engine: jackfield.Engine, **settings: Any) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=COUNT, **settings)]


def marked(name: str) -> Any:
    library = LIBRARY.get(name.partition("?")[0])
    missing = library is not None and importlib.util.find_spec(library) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"needs {library}"))


@pytest.mark.parametrize("quantizer", [marked(name) for name in QUANTIZERS])
@pytest.mark.one_in(4)
def test_on_stored_weights(quantizer: str, adapters: dict[str, Path]) -> None:
    dtype = "bfloat16" if quantizer == "int4-cpu" else "float32"
    given = {"quantization": quantizer, "dtype": dtype}
    with jackfield.load("demo", **given) as engine:
        pass
    wanted = {name: right(engine, path) for name, path in {None: None, **adapters}.items()}
    assert len({str([one.tokens for one in each]) for each in wanted.values()}) == 3
    with jackfield.load("demo", adapter=adapters["a"], **given) as engine:
        assert not follows(tokens(engine), wanted["a"])
        report = engine.report()
        assert report.adapter is not None
        assert (report.adapter.state, report.adapter.adapter.rank) == ("on", RANK)
        with engine.disable_adapter():
            assert not follows(tokens(engine), wanted[None])
            assert engine.report().adapter.state == "off"  # type: ignore[union-attr]
            with pytest.raises(SettingsError, match="without adapters that a request could name"):
                engine.generate("x", adapter="default")
        assert (engine.adapters, report.adapters) == ({}, {})
        assert not follows(tokens(engine), wanted["a"])
        assert all(f"adapter {adapters['a']}" in str(one.report) for one in engine.generate("x"))
    with jackfield.load("demo", adapters=adapters, **given) as engine:
        names = [None, "a", "b"]
        found = engine.generate(
            [text for text in PROMPTS for _ in names],
            settings=[{"adapter": name} for _ in PROMPTS for name in names],
            max_new_tokens=COUNT,
        )
        for at, name in enumerate(names):
            assert not follows([one.token_ids for one in found[at::3]], wanted[name]), name


def test_gguf(adapters: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs jackfield[gguf]")
    from gguf_files import Type, export
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    file = export(model, tmp_path / "demo.gguf", Type.Q4_0, tokenizer)
    with jackfield.load(file) as engine:
        pass
    wanted = {name: right(engine, path) for name, path in {None: None, **adapters}.items()}
    with jackfield.load(file, adapter=adapters["a"]) as engine:
        assert not follows(tokens(engine), wanted["a"])
    with jackfield.load(file, adapters=adapters) as engine:
        assert not follows(tokens(engine, adapter="b"), wanted["b"])
        assert not follows(tokens(engine), wanted[None])


def test_what_only_peft_can_is_refused(tmp_path: Path, adapters: dict[str, Path]) -> None:
    with hushed():
        model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
        config = peft.LoraConfig(use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
        peft.get_peft_model(model, config).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match=r"takes no LORA adapter on top \(adapters\)"):
        jackfield.plan("demo", adapter=tmp_path, quantization="int4-cpu")
    with pytest.raises(PlanError, match="cannot merge an adapter"):
        jackfield.plan("demo", adapter=adapters["a"], merge_adapter=True, quantization="int4-cpu")
    with pytest.raises(PlanError, match="would compile without it; drop compile"):
        jackfield.plan("demo", adapter=adapters["a"], quantization="int4-cpu", compile="native")

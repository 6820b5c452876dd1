"""gptq: quantized here with a calibration set, saved, read again, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import character_tokenizer, config_of
from quantized import follows, oracle, tokens_of
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import jackfield
from jackfield.bridge.footprint import loaded_bytes
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, PlanError, UsageError
from jackfield.estimates.evaluation import evaluate
from jackfield_plugins.quantizer.gptq import ERRORS
from jackfield_plugins.quantizer.gptqmodel import import_gptqmodel, reading

if TYPE_CHECKING:
    from forking import Forks

missing = [name for name in ("gptqmodel", "optimum") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason="needs jackfield[gptq], see docs/quantizers.md"),
    # Made by protobuf's compiled classes, which gptqmodel imports.
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning"),
]
GROUP = 32
NUMBERS = 8 * 405_504
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
FEATURES = 8 * (6 * 192 + 512)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in 4 bits, with a little calibration: it takes half a minute."""
    folder = tmp_path_factory.mktemp("gptq")
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    with jackfield.load("demo", quantization="gptq?samples=8", dtype="float32") as engine:
        assert (root.level, root.handlers) == before
        planned = jackfield.plan("demo", quantization="gptq").requirements.weight_bytes
        scales, zeros = NUMBERS // GROUP * 2, NUMBERS // GROUP // 2
        assert planned == 602_880 + NUMBERS // 2 + scales + zeros + 4 * FEATURES
        assert loaded_bytes(engine.model) == planned == engine.plan.requirements.weight_bytes
        assert "56 of 57 linear layers" in str(engine.report())
        (folder / "tokens.json").write_text(json.dumps(tokens_of(engine)))
        engine.model.save_pretrained(folder)
        engine.tokenizer.save_pretrained(folder)
        torch.save(engine.model.state_dict(), folder / "state")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def test_saved_and_read_again_it_is_the_same(saved: Path) -> None:
    state = torch.load(saved / "state", weights_only=True)
    expected = json.loads((saved / "tokens.json").read_text())
    with jackfield.load(saved) as engine:
        assert engine.plan["quantizer"].registered.name == "gptq"
        assert loaded_bytes(engine.model) == engine.plan.requirements.weight_bytes
        again = engine.model.state_dict()
        assert state.keys() == again.keys()
        assert all(torch.equal(state[name], again[name]) for name in state)
        assert tokens_of(engine) == expected
    written = json.loads((saved / "config.json").read_text())["quantization_config"]
    assert written["dataset"] is None
    assert written["tokenizer"] is None


@pytest.mark.long
def test_answers_are_within_two_points_of_full_precision(saved: Path) -> None:
    with jackfield.load("demo", dtype="float32") as engine:
        exact = evaluate(engine, count=20).accuracy
    with jackfield.load(saved) as engine:
        assert evaluate(engine, count=20).accuracy >= exact - 0.02


@pytest.mark.parametrize(
    ("attention", "cache"),
    [
        ("eager", "dynamic"),
        ("sdpa", "static"),
        ("sdpa", "paged"),
        pytest.param("eager", "static", marks=pytest.mark.long),
        pytest.param("eager", "paged", marks=pytest.mark.long),
        pytest.param("sdpa", "dynamic", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_every_attention_and_cache_says_what_transformers_says(
    saved: Path, attention: str, cache: str
) -> None:
    expected = oracle("gptq", "float32", str(saved))
    chosen = {"attn_implementation": attention, "cache_implementation": cache}
    with jackfield.load(saved, max_batch_size=3, **chosen) as engine:
        assert not follows(tokens_of(engine), expected)


def test_another_quantizer_and_deterministic_are_refused(saved: Path) -> None:
    with pytest.raises(PlanError, match="quantized already, with gptq"):
        jackfield.load(saved, quantization="bnb-4bit")
    with pytest.raises(PlanError, match="not batch-invariant"):
        jackfield.load(saved, deterministic=True)


@pytest.mark.parametrize("change", [{"bits": 8}, {"group_size": 64}, {"bits": 2}])
def test_a_config_that_does_not_fit_its_weights(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not fit the weights") as caught:
        jackfield.load(folder)
    assert "\n" not in str(caught.value)


def test_shards_that_are_broken(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="fetch it again"):
        jackfield.load(folder)
    name = "model.layers.3.mlp.up_proj.qweight"
    save_file({k: v for k, v in tensors.items() if k != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"there is no {name}"):
        jackfield.load(folder)


def test_a_folder_without_a_tokenizer(tmp_path: Path, tiny: Any) -> None:
    model = tiny("llama", **WIDE)
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no tokenizer: give tokenizer="):
        jackfield.load(tmp_path, quantization="gptq")


def test_calibration_from_a_file(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*args: Any) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    model = tiny("qwen2", **WIDE)
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    model.save_pretrained(folder)
    text.write_text("\n \n")
    selection = f"gptq?calibration={text}&group_size=16&bits=8&samples=2"
    given: dict[str, Any] = {"quantization": selection, "tokenizer": character_tokenizer()}
    with pytest.raises(UsageError, match="has no text in it"):
        jackfield.load(folder, **given)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        jackfield.load(folder, **given)
    text.write_text("abc abd\nhello there, who is that\n" * 20)
    with jackfield.load(folder, **given) as engine:
        assert loaded_bytes(engine.model) == engine.plan.requirements.weight_bytes
        assert len(engine.generate([1, 2, 3], max_new_tokens=4)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("selection", "family", "says"),
    [
        ("gptq?group_size=128", "demo", "128 do not divide 192 columns .* write 'group_size=64'"),
        ("gptq", "llama", "packs rows and columns in 32s"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(selection: str, family: str, says: str) -> None:
    model: Any = "demo" if family == "demo" else config_of(family)
    with pytest.raises(PlanError, match=says):
        jackfield.plan(model, quantization=selection)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_grid_holds_the_weights_of_its_group(bits: int, symmetric: bool) -> None:
    """Whatever their signs, none is further off than a step of the grid that both signs need."""
    import_gptqmodel()
    from gptqmodel.quantization.quantizer import Quantizer

    drawn = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    weights = torch.cat(
        [drawn, drawn.abs(), -drawn.abs(), drawn[:, :1].expand(40, 32), 0 * drawn[:1]]
    )
    own = Quantizer.find_params
    with reading():
        grid = Quantizer(SimpleNamespace(bits=bits, sym=symmetric, mse=0.0))
        grid.configure(perchannel=True)
        grid.find_params(weights, weight=True)
    assert Quantizer.find_params is own
    off = (grid.quantize(weights) - weights).abs().amax(1)
    assert grid.maxq == 2**bits - 1
    step = 2 * weights.abs().amax(1) / (2**bits - 1)
    assert (off <= 1.01 * step).all()


def test_weights_of_one_sign_are_within_what_is_declared(tmp_path: Path, tiny: Any) -> None:
    model: Any = tiny("qwen2", **WIDE)
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    for name, weight in model.named_parameters():
        if name.endswith("proj.weight"):
            weight.data.abs_()
    model.save_pretrained(folder)
    text.write_text("abc abd\nhello there, who is that\n" * 20)
    selection = f"gptq?calibration={text}&bits=8&samples=2"
    given: dict[str, Any] = {"quantization": selection, "tokenizer": character_tokenizer()}
    with jackfield.load(folder, dtype="float32", **given) as engine:
        units, compared = torch.eye(WIDE["hidden_size"]), 0
        for path, module in engine.model.named_modules():
            if hasattr(module, "qweight"):
                right = model.get_submodule(path).weight.data
                found = module(units) - module(0 * units)
                assert (found.T - right).norm() <= ERRORS[8] * right.norm(), path
                compared += 1
        assert compared == 7 * model.config.num_hidden_layers


@pytest.mark.long
def test_plain_transformers_code_reads_its_config() -> None:
    config: Any = jackfield.quantization("plugin:gptq?bits=8&group_size=64&samples=2")
    assert (config.bits, config.group_size) == (8, 64)
    assert len(config.dataset) == 16
    assert all(isinstance(text, str) for text in config.dataset)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, num_hidden_layers=1, quantization_config=config
    )
    backend = jackfield.plan(model)["quantizer"].backend
    assert sum(map(backend.converted, model.modules())) == 7


def test_the_default_text_is_cut_into_windows() -> None:
    from jackfield_plugins.quantizer.calibration import windows

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    found = windows(None, tokenizer, 3, 64)
    assert [piece["input_ids"].shape for piece in found] == [(1, 64)] * 3
    assert "<|assistant|>" in tokenizer.decode(found[0]["input_ids"][0])


def test_the_import_leaves_the_folders_of_the_hub_and_torchs_settings_alone(forks: Forks) -> None:
    code = (
        "import os, sys; from torch._dynamo import config; set = config.get_config_copy()\n"
        "before = dict(os.environ); assert 'tokenicer' not in sys.modules\n"
        "from jackfield_plugins.quantizer.gptqmodel import HUB_FOLDERS, import_gptqmodel\n"
        "import_gptqmodel(); import tokenicer\n"
        "print([n for n in HUB_FOLDERS if os.environ.get(n) != before.get(n)],\n"
        "      [n for n, value in config.get_config_copy().items() if set[n] != value])"
    )
    done = forks.python("-c", code)
    assert done.stdout.strip().splitlines()[-1:] == ["[] []"], done.stderr[-500:]

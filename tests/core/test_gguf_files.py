"""Models in one GGUF file: read as transformers' own, named where they cannot be."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from families import build, character_tokenizer, config_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import jackfield
from jackfield.bridge.gguf_header import read_header
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, UsageError

pytest.importorskip("gguf", reason="needs jackfield[gguf]")
from gguf_files import Type, export

if TYPE_CHECKING:
    from command_line import Cli
    from forking import Forks

TEXTS = ("Hello, world!", "  two  spaces\n\ttab 12345 + 67", "déjà vu 你好 <|user|> end", "")


def model_of(family: str) -> Any:
    """A model of the family as far as a GGUF file tells of it."""
    config = config_of(family)
    config.tie_word_embeddings = family in ("gemma2", "gemma3", "qwen2")
    if family == "qwen2":
        config.use_sliding_window, config.layer_types = False, ["full_attention"] * 2
    if family == "qwen3-moe":
        config.norm_topk_prob = True  # which llama.cpp takes for granted
    if family == "gemma3":
        config.layer_types = ["sliding_attention"] * 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its tokenizer, in float32."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    return export(model, tmp_path_factory.mktemp("gguf") / "demo.gguf", tokenizer=tokenizer)


def logits(engine: jackfield.Engine, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return engine.model(ids).logits


FAMILIES = [
    "llama",
    "llama-mqa",
    "llama-wide-heads",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "qwen3-moe",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(4)
def test_a_file_is_the_model_that_was_exported(family: str, tmp_path: Path) -> None:
    model, ids = model_of(family), torch.arange(3, 40)[None]
    path = export(model, tmp_path / "model.gguf")
    with jackfield.load(path, cache_implementation="dynamic") as engine:
        assert engine.model.dtype is torch.float32
        with torch.no_grad():
            wanted = model(ids).logits
        torch.testing.assert_close(logits(engine, ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = model_of("qwen3-moe")
    first = export(model, tmp_path_factory.mktemp("parts") / "model.gguf", split=9)
    return sorted(first.parent.iterdir())


def test_a_model_in_several_files(parts: list[Path], tmp_path: Path) -> None:
    """Whichever of them is named; each layer's tensors lie in two of them."""
    assert len(parts) > 2
    ids = torch.arange(3, 40)[None]
    whole = export(model_of("qwen3-moe"), tmp_path / "model.gguf")
    with jackfield.load(whole, cache_implementation="dynamic") as engine:
        wanted = logits(engine, ids)
    for path in (parts[0], parts[-1]):
        with jackfield.load(path, cache_implementation="dynamic") as engine:
            assert torch.equal(logits(engine, ids), wanted)


#: What becomes of copies of the parts -> what is said.
DAMAGED: dict[str, tuple[Callable[[list[Path]], Any], str]] = {
    "missing": (lambda p: p[1].unlink(), "is not a file"),
    "another": (lambda p: shutil.copy(p[1], p[2]), "says that it is part 2 of"),
    "cut off": (lambda p: p[1].write_bytes(p[1].read_bytes()[:-1]), "is not a whole GGUF file"),
    "first alone": (lambda p: p[0].rename(p[0].with_name("alone.gguf")), "side by side"),
    "second alone": (lambda p: p[1].rename(p[0].with_name("alone.gguf")), "side by side"),
    "of another model": (lambda p: spoilt(p[1], b"split.count", 2), "says that it is part 2 of 2"),
    "too many": (lambda p: spoilt(p[0], b"split.tensors.count", 3), "tensors, and it says 3"),
    "twice": (lambda p: with_names_of(p[1], p[2]), "which is in another part too"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_parts_that_do_not_fit(name: str, parts: list[Path], tmp_path: Path) -> None:
    spoil, said = DAMAGED[name]
    copies = [Path(shutil.copy(part, tmp_path)) for part in parts]
    spoil(copies)
    alone = tmp_path / "alone.gguf"
    assert said in refusal(alone if alone.exists() else copies[0])


def spoilt(path: Path, key: bytes, value: int) -> None:
    """Another value of a whole number of two bytes or more."""
    whole = bytearray(path.read_bytes())
    at = whole.index(key) + len(key) + 4
    whole[at : at + 2] = value.to_bytes(2, "little")
    path.write_bytes(whole)


def with_names_of(path: Path, other: Path) -> None:
    """A tensor of `other` gets the name of one of `path` that is as long."""
    names, whole = list(read_header(path).tensors), other.read_bytes()
    for own in read_header(other).tensors:
        if taken := next((n for n in names if len(n) == len(own)), None):
            other.write_bytes(whole.replace(own.encode(), taken.encode()))
            return
    raise AssertionError("no two names of one length")


def test_half_precision_is_kept_and_any_quantizer_reads_it(tmp_path: Path) -> None:
    model = build("llama", torch.float32)
    for kind, dtype in ((Type.BF16, "bfloat16"), (Type.F16, "float16")):
        path = export(model, tmp_path / f"{dtype}.gguf", kind)
        assert jackfield.plan(path).requirements.dtype == dtype
    with jackfield.load(path, dtype="bfloat16", quantization="int4-cpu") as engine:
        assert len(engine.generate([[5, 6, 7]], max_new_tokens=3)[0].token_ids) == 3


def test_the_tokenizer_of_the_file(demo: Path) -> None:
    own = AutoTokenizer.from_pretrained(MODEL_PATH)
    with jackfield.load("demo", dtype="float32") as engine:
        (wanted,) = engine.generate([[{"role": "user", "content": "Sort: 41 7 88"}]])
    with jackfield.load(demo) as engine:
        for text in TEXTS:
            assert engine.tokenizer(text)["input_ids"] == own(text)["input_ids"], text
        (found,) = engine.generate([[{"role": "user", "content": "Sort: 41 7 88"}]])
    assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)


def test_a_bos_that_the_file_asks_for(demo: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    keys = {"tokenizer.ggml.bos_token_id": 7, "tokenizer.ggml.add_bos_token": True}
    tokenizer.bos_token = None
    path = export(model, tmp_path / "bos.gguf", tokenizer=tokenizer, **keys)
    with jackfield.load(path) as engine:
        plain = tokenizer("Hello", add_special_tokens=False)["input_ids"]
        assert engine.tokenizer("Hello")["input_ids"] == [7, *plain]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_embeddings_of_llama_3_1(factor: float, tmp_path: Path) -> None:
    config = config_of("llama")
    config.head_dim, config.max_position_embeddings = 64, 131072
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    divisors = plain / model.model.rotary_emb.inv_freq
    path = export(model, tmp_path / "model.gguf", tensors={"rope_freqs.weight": divisors.numpy()})
    with jackfield.load(path, cache_implementation="dynamic") as engine:
        own = engine.model.model.rotary_emb.inv_freq
        torch.testing.assert_close(own, model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)
    divisors[20] *= 1.1
    path = export(model, tmp_path / "odd.gguf", tensors={"rope_freqs.weight": divisors.numpy()})
    with pytest.raises(CheckpointError, match="are not those of Llama"):
        jackfield.plan(path)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"type": "none"}, {"rope_type": "default"}),
    ],
)
def test_stretched_rotary_embeddings(keys: Any, rope: Any, tmp_path: Path) -> None:
    own = {f"qwen2.rope.scaling.{key}": value for key, value in keys.items()}
    path = export(model_of("qwen2"), tmp_path / "model.gguf", **own)
    with jackfield.load(path) as engine:
        assert engine.model.config.rope_parameters.items() >= rope.items()


def refusal(path: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        jackfield.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


#: What a file says beside the demo's -> what is said of it.
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"split.count": 3}, "is one of 3 parts of a file; have all of them"),
    "long rope": ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
                  "stretches its rotary embeddings by longrope"),
    "half heads": ({"llama.rope.dimension_count": 4}, "4"),
    "scale": ({"llama.attention.scale": 0.5}, "attention.scale = 0.5"),
    "layers": ({"llama.block_count": 3}, "no tensor for model.layers.2."),
    "heads": ({"llama.attention.head_count_kv": 4}, "and has to have the shape [32, 32]"),
    "a key that is text": ({"llama.attention.key_length": "x"}, "attention.key_length = x"),
    "half a key": ({"llama.attention.key_length": 1.5}, "attention.key_length = 1.5"),
    "no heads": ({"llama.attention.head_count": 0}, "transformers makes no config of"),
    "many layers": ({"llama.block_count": 1 << 31}, "num_hidden_layers=2147483648"),
    "images": ({"general.architecture": "clip"}, "is the part of a model that reads images"),
    "an adapter": ({"general.type": "adapter"}, "is an adapter; give the model's file"),
    "other": ({"general.architecture": "rwkv7"}, "architecture 'rwkv7'"),
    "no text": ({"general.architecture": "t5"}, "architecture 't5'"),
    "eos": ({"tokenizer.ggml.eos_token_id": 500}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_a_file_says_that_cannot_be(name: str, tmp_path: Path) -> None:
    keys, wanted = SAID[name]
    path = export(build("llama", torch.float32), tmp_path / "model.gguf", **keys)
    if wanted:
        assert wanted in refusal(path)
    else:
        jackfield.load(path).close()


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    model = build("llama", torch.float32)
    for tensors, wanted in (
        ({"blk.1.attn_q.weight": None}, "no tensor for model.layers.1.self_attn.q_proj.weight"),
        ({"token_embd.weight": None}, "no matrix token_embd.weight"),
        ({"blk.0.ffn_up.weight": torch.ones(47, 32).numpy()}, "and has to have the shape [48, 32]"),
        ({"output_norm.weight": torch.ones(31).numpy()}, "the wrong shape for model.norm.weight"),
        (
            {"blk.0.attn_k.bias": torch.ones(16).numpy()},
            "blk.0.attn_k.bias beside blk.0.attn_k.",
        ),
        ({"output.bias": torch.ones(120).numpy()}, "has output.bias beside output.weight, which"),
        ({"blk.1.ffn_up.scale": torch.ones(1).numpy()}, "a LlamaForCausalLM of its config leaves"),
    ):
        path = export(model, tmp_path / "model.gguf", tensors=tensors)
        assert wanted in refusal(path)


def test_a_file_that_is_cut_off_anywhere(demo: Path, tmp_path: Path, cli: Cli) -> None:
    whole, cut = demo.read_bytes(), tmp_path / "cut.gguf"
    start = min(t.start for t in read_header(demo).tensors.values())
    ends = [*range(0, 200, 7), *range(200, start, start // 150), start, start + 1, len(whole) - 1]
    for end in ends:
        cut.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match="GGUF file") as caught:
            read_header(cut)
        assert "\n" not in str(caught.value)
    for end in (0, 30, start // 2, len(whole) - 1):
        cut.write_bytes(whole[:end])
        cli("generate", "hi", "--model", str(cut)).assert_failed(2, f"{cut} is not a")


def is_read(path: Path) -> bool:
    try:
        read_header(path)
    except CheckpointError:
        return False
    return True


def test_bytes_that_are_changed_anywhere(demo: Path, tmp_path: Path) -> None:
    """A header with one other byte is read, or an error of ours, at once."""
    whole, changed = demo.read_bytes(), tmp_path / "changed.gguf"
    start = min(t.start for t in read_header(demo).tensors.values())
    drawn, kept = random.Random(0), 0
    changed.write_bytes(whole)
    with changed.open("r+b") as file:
        for _ in range(500):
            place = drawn.randrange(start)
            os.pwrite(file.fileno(), bytes([drawn.randrange(256)]), place)
            kept += is_read(changed)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert 50 < kept < 500


def test_what_is_no_file(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "text.gguf").write_text("{}")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, wanted in (
        ("text", "is not a GGUF file"),
        ("pipe", "is not a file"),
        ("none", "is not a file"),
    ):
        cli("generate", "hi", "--model", str(tmp_path / f"{name}.gguf")).assert_failed(2, wanted)
    assert "there is no file none.gguf" in refusal("none.gguf")
    assert "there is no file me/none.gguf" in refusal("me/none.gguf")
    assert "cannot fetch 'me/model/none.gguf'" in refusal("me/model/none.gguf")
    with pytest.raises(UsageError, match="only models of the hub have revisions"):
        jackfield.load(tmp_path / "text.gguf", revision="main")


def test_without_the_package(demo: Path, forks: Forks) -> None:
    script = (
        "import sys; assert 'gguf' not in sys.modules; sys.modules['gguf'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'gguf' else find(name, *a)\n"
        f"import jackfield; jackfield.plan({str(demo)!r})"
    )
    done = forks.python("-c", script)
    assert "gguf is not installed: pip install 'jackfield[gguf]'" in done.stderr


@pytest.mark.long
def test_a_file_of_the_hub(demo: Path, tmp_path: Path) -> None:
    """Fetched once, by OWNER/REPOSITORY/FILE, and then found without a network."""
    script = Path(__file__).with_name("gguf_of_a_hub.py")
    done = subprocess.run(
        [sys.executable, script, demo, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["model.GGUF", "sha256-4b7f", "model.bin"])
def test_a_file_of_another_name(name: str, demo: Path, tmp_path: Path) -> None:
    path = shutil.copy(demo, tmp_path / name)
    with jackfield.load(path) as engine:
        assert engine.generate("Sort: 3 1 2", max_new_tokens=2)[0].token_ids


def test_a_folder_with_a_file_in_it_names_the_file(demo: Path) -> None:
    assert f"give its file '{demo}'" in refusal(demo.parent)


@pytest.mark.parametrize("name", ["~/model.gguf", "~/model"])
def test_a_home_that_nobody_expands(name: str) -> None:
    assert "(~ is not expanded)" in refusal(name)


def test_a_tokenizer_that_is_another_models(
    demo: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    own = AutoTokenizer.from_pretrained(MODEL_PATH)
    jackfield.load(demo, tokenizer=own).close()
    assert "the tokenizer that was given" not in caplog.text
    jackfield.load(demo, tokenizer=character_tokenizer()).close()
    assert "the tokenizer that was given has" in caplog.text
    assert str(demo) in caplog.text
    jackfield.load(demo, quantization="int8-cpu").close()
    assert not [one for one in recwarn if "not writable" in str(one.message)]

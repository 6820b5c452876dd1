"""Folders that are no model, or no whole one, or not safe: refused, and nothing is half-loaded."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import extras
import pytest
import torch
import transformers
from families import build, character_tokenizer
from safetensors.torch import load_file, save_file

import jackfield
from jackfield.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    build("llama", torch.float32).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def mistake(act: Callable[[], Any], kind: type[UsageError] = UsageError) -> str:
    """The message of the error that `act` raises, after checking what all of them have to be."""
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message
    assert "\n" not in message
    assert len(message) < 500
    return message


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    data = json.loads((folder / name).read_text())
    data.update(changes)
    (folder / name).write_text(json.dumps(data))


@pytest.fixture
def weights_stay_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", opened)


@pytest.mark.usefixtures("weights_stay_closed")
def test_places_without_a_model(tmp_path: Path, folder: Path) -> None:
    def message(place: Any) -> str:
        return mistake(lambda: jackfield.load(place), CheckpointError)

    assert "no config.json" in message(tmp_path)
    assert "is not a folder" in message(tmp_path / "nowhere")
    assert "is not a folder" in message(folder / "config.json")
    assert "is not a folder" in message("./nowhere")
    assert "neither a folder here nor a model that the hub" in message("somebody/nothing")
    assert "did you mean 'demo'" in message("dem0")
    assert message("")
    assert message("not a name at all?!")


@pytest.mark.usefixtures("weights_stay_closed")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{broken", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1, 2]", "config.json"),
        ("{}", "config.json"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "config.json"),
        ('{"model_type": "llama", "hidden_size": 31, "num_attention_heads": 4}', "31"),
        ('{"model_type": "whisper"}', "does not fit its weights"),
        ('{"model_type": "pix2struct"}', "reads no text"),
        ('{"model_type": "clip"}', "text-generation"),
        ('{"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}', "bert"),
    ],
)
def test_configs(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_text(text)
    assert words in mistake(lambda: jackfield.load(folder))


@pytest.mark.usefixtures("weights_stay_closed")
@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptq"),
        pytest.param(
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "has no model.layers",
            marks=extras.marked("bitsandbytes"),
        ),
        pytest.param(
            {"quant_method": "gptq", "load_in_8bit": True},
            "has no model.layers",
            marks=extras.marked("bitsandbytes"),
        ),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "of-my-own"}, "of-my-own"),
        ({}, "names no quant_method"),
    ],
)
def test_a_quantized_checkpoint_is_never_loaded_as_if_it_were_plain(
    folder: Path, stored: dict[str, Any], words: str
) -> None:
    edit(folder, quantization_config=stored)
    assert words in mistake(lambda: jackfield.load(folder), UsageError)


@pytest.mark.usefixtures("weights_stay_closed")
def test_code_in_a_repository_is_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *args: asked.append(args) or "n")
    marker = folder / "ran"
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')")
    edit(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    assert "never executes" in mistake(lambda: jackfield.load(folder))
    edit(folder, model_type="llama", auto_map={"AutoModelForCausalLM": "mine.Model"})
    tokenizer_map = {"AutoTokenizer": ["mine.Tokenizer", None]}
    edit(folder, "tokenizer_config.json", tokenizer_class="Mine", auto_map=tokenizer_map)
    assert "tokenizer" in mistake(lambda: jackfield.load(folder))
    assert not marker.exists()
    assert asked == []


def test_data_never_selects_an_attention(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def connect(*args: Any) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    kernel = "kernels-community/evil"
    edit(folder, _attn_implementation=kernel, attn_implementation=kernel,
         _attn_implementation_internal=kernel, experts_implementation="deepgemm")  # fmt: skip
    with caplog.at_level(logging.WARNING, "jackfield"), jackfield.load(folder) as engine:
        assert len(engine.generate([1, 2], max_new_tokens=2)[0].token_ids) == 2
        assert kernel not in str(vars(engine.model.config))
    warned = [r.getMessage() for r in caplog.records if r.name == "jackfield"]
    assert any("_attn_implementation_internal='kernels-community/evil'" in m for m in warned)
    assert any("experts_implementation='deepgemm'" in m for m in warned)


class Trap:
    """What runs when a pickle is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickles_are_refused_before_they_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    marker = folder / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(marker)))
    message = mistake(lambda: jackfield.load(folder), CheckpointError)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message
    assert not marker.exists()


def shards(folder: Path) -> list[Path]:
    """Split the weights of `folder` in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    chosen = {key: names[i % 2] for i, key in enumerate(sorted(tensors))}
    for name in names:
        part = {key: tensors[key] for key in chosen if chosen[key] == name}
        save_file(part, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / name for name in names]


def test_shards(folder: Path) -> None:
    first, second = shards(folder)
    with jackfield.load(folder) as engine:
        assert engine.generate([1, 2], max_new_tokens=2)
    second.unlink()
    assert second.name in mistake(lambda: jackfield.load(folder), CheckpointError)
    index = folder / "model.safetensors.index.json"
    for text in ("{broken", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        assert "index" in mistake(lambda: jackfield.load(folder), CheckpointError), text
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    assert mistake(lambda: jackfield.load(folder), CheckpointError)
    assert first.exists()


HEADERS = [b"[]", b"7", b"null", b'{"a": {}}', b'{"a": {"data_offsets": []}}', b'{"a": 3}', b"\xff"]
HEADERS += [
    b'{"a": {"shape": null, "data_offsets": [0, 0]}}',
    b'{"a": {"shape": [null], "data_offsets": [0, 0]}}',
    b'{"a": {"shape": [], "data_offsets": [0, 0.0]}}',
]


def test_weights_that_are_not_whole(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    broken = [whole[:-1], whole[: len(whole) // 2], whole[:100], whole[:4], b"", b"\xff" * 50]
    broken += [whole + b"x", *(len(h).to_bytes(8, "little") + h for h in HEADERS)]
    for content in broken:
        file.write_bytes(content)
        message = mistake(lambda: jackfield.load(folder), CheckpointError)
        assert "model.safetensors" in message
        assert "fetch it again" in message
    file.unlink()
    assert "no weights" in mistake(lambda: jackfield.load(folder), CheckpointError)


def test_weights_that_do_not_fit_the_config(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file, {"format": "pt"})
    message = mistake(lambda: jackfield.load(folder), CheckpointError)
    assert f"lacks {name}" in message
    told = f"the config.json of {folder} does not fit its weights"
    assert told in message
    save_file(tensors, file, {"format": "pt"})
    edit(folder, intermediate_size=40)
    assert told in mistake(lambda: jackfield.load(folder), CheckpointError)
    edit(folder, intermediate_size=48, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, "jackfield"):
        jackfield.load(folder).close()
    assert "no place for: model.layers.1." in caplog.text


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_weights_that_are_no_numbers_of_a_model(
    folder: Path, dtype: torch.dtype, weights_stay_closed: None
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        save_file({**tensors, name: tensors[name].to(dtype)}, file, {"format": "pt"})
        message = mistake(lambda: jackfield.load(folder), CheckpointError)
        assert name in message
        assert "names no quantization" in message


def test_a_head_of_its_own_that_the_config_ties(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jackfield"):
        jackfield.load(folder).close()
        assert "head" not in caplog.text
        edit(folder, tie_word_embeddings=True)
        with jackfield.load(folder) as engine:
            found = engine.generate("ab", max_new_tokens=4)[0].token_ids
    assert "weights of its own for the head" in caplog.text
    edit(folder, tie_word_embeddings=False)
    with jackfield.load(folder) as engine:
        assert engine.generate("ab", max_new_tokens=4)[0].token_ids == found


def test_files_beside_the_weights(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{broken")
    assert "generation_config.json" in mistake(lambda: jackfield.load(folder), CheckpointError)
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    with jackfield.load(folder) as engine:
        message = mistake(lambda: engine.generate([1]))
        assert "the model's generation_config" in message
        assert engine.generate([1], num_beams=1, max_new_tokens=1)
    (folder / "tokenizer.json").write_text("{broken")
    assert "tokenizer" in mistake(lambda: jackfield.load(folder), CheckpointError)
    (folder / "tokenizer.json").unlink()
    message = mistake(lambda: jackfield.load(folder), CheckpointError)
    assert "no tokenizer.json; fetch it again, or give tokenizer=" in message


def test_the_folder_itself_is_fine(folder: Path) -> None:
    with jackfield.load(folder) as engine:
        assert engine.generate("ab", max_new_tokens=2)
        assert transformers.utils.logging.is_progress_bar_enabled()

"""Folders whose files a stranger wrote: a model that runs, or a clean line that names the file."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import hostile_files
import pytest
import torch
from families import build, character_tokenizer
from hostile_files import INDEX, WEIGHTS, Attack

import jackfield
from jackfield.errors import CheckpointError, JackfieldError, PromptError, UsageError

CONFIG = (
    "_name_or_path", "attn_implementation", "auto_map", "base_model_tp_plan", "id2label",
    "layer_types", "quantization_config", "rope_scaling", "sliding_window", "text_config",
    "torch_dtype", "transformers_weights",
)  # fmt: skip
GENERATION = (
    "bad_words_ids", "cache_implementation", "compile_config", "do_sample", "eos_token_id",
    "max_length", "max_new_tokens", "min_p", "num_beams", "repetition_penalty", "sequence_bias",
    "stop_strings", "suppress_tokens", "temperature", "top_k", "top_p", "watermarking_config",
)  # fmt: skip
TOKENIZER = ("added_tokens_decoder", "auto_map", "chat_template", "extra_special_tokens")
#: Files of settings, and what messages call them: of these each field is named.
NAMED = {
    "config.json": "config.json",
    "generation_config.json": "generation_config",
    "tokenizer_config.json": "tokenizer_config.json",
}
TOLD = 1000  # characters of a message

Groups = Callable[[Path], Iterable[Attack]]

GROUPS: dict[str, Groups] = {
    "config.json, whole": lambda f: hostile_files.any_json(f / "config.json"),
    "config.json, fields": lambda f: hostile_files.fields(f / "config.json", CONFIG, 2),
    "generation_config.json, whole": lambda f: hostile_files.any_json(f / "generation_config.json"),
    "generation_config.json, fields": lambda f: hostile_files.fields(
        f / "generation_config.json", GENERATION
    ),
    "tokenizer.json, whole": lambda f: hostile_files.any_json(f / "tokenizer.json"),
    "tokenizer.json, fields": lambda f: hostile_files.fields(f / "tokenizer.json", (), 2),
    "tokenizer_config.json, whole": lambda f: hostile_files.any_json(f / "tokenizer_config.json"),
    "tokenizer_config.json, fields": lambda f: hostile_files.fields(
        f / "tokenizer_config.json", TOKENIZER
    ),
    "weights": lambda f: hostile_files.weights(f / WEIGHTS),
    "index": lambda f: hostile_files.shards(f / INDEX, f.parent / "outside.safetensors"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder that each group begins with: the weights in one file, or in two and an index."""
    whole, split = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("split") / "model"
    build("llama", torch.float32).save_pretrained(whole)
    character_tokenizer().save_pretrained(whole)
    shutil.copytree(whole, split)
    hostile_files.split(split)
    return {name: split if name == "index" else whole for name in GROUPS}


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A whole one, beside a whole file of weights that are not its own."""
    shutil.copy(saved["weights"] / WEIGHTS, tmp_path / "outside.safetensors")
    return shutil.copytree(saved["weights"], tmp_path / "hostile")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(100, "transformers")


def run(folder: Path) -> list[int]:
    """Three tokens of what is in `folder`."""
    with jackfield.load(folder, attn_implementation="sdpa") as engine:
        prompt: Any = "abc" if engine.tokenizer is not None else [65, 66, 67]
        (done,) = engine.generate(prompt, max_new_tokens=3)
    if done.error is not None:
        raise UsageError(done.error)
    return done.token_ids


def assert_told(error: JackfieldError, attack: Attack) -> None:
    """That the message is clean, and names the file and the field, or the file or its folder."""
    message = str(error)
    field, is_field, _ = attack.what.partition(" is ")
    assert message.isprintable(), attack
    assert len(message) < TOLD, attack
    if is_field and attack.file in NAMED and "is not valid JSON" not in message:
        assert NAMED[attack.file] in message, (attack, message)
        assert field.rpartition(".")[2] in message, (attack, message)
    else:
        assert any(word in message for word in (attack.file, "/hostile", "the prompt")), message


def outcome(folder: Path, attack: Attack, act: Callable[[Path], Any]) -> str:
    """What comes of it; anything but a right run and a refusal is raised."""
    attack.act(folder / attack.file)
    try:
        act(folder)
    except JackfieldError as error:
        assert_told(error, attack)
        return "refused by name"
    except BaseException as error:
        error.add_note(str(attack))
        raise
    return "ran"


def some(attacks: Iterable[Attack], every: int) -> Iterator[Attack]:
    """A part of them that has each kind of value sooner or later."""
    return (attack for at, attack in enumerate(attacks) if at % every == 0)


def test_the_folder_itself_runs(folder: Path) -> None:
    assert len(run(folder)) == 3


def checked(saved: dict[str, Path], folder: Path, name: str, every: int) -> Counter[str]:
    """The outcomes of a group. None takes a gigabyte; what runs on unchanged weights is right."""
    expected = run(folder) if name in ("weights", "index") else None

    def act(folder: Path) -> None:
        if name.startswith("config.json"):
            jackfield.plan(folder)
        else:
            assert run(folder) == (expected or ANY)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: Counter[str] = Counter()
    anew(saved[name], folder)
    for attack in some(GROUPS[name](folder), every):
        found[outcome(folder, attack, act)] += 1
        anew(saved[name], folder)
    if sys.platform == "linux":  # in kilobytes there
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    print(f"| {name} | {found.total()} | {found['refused by name']} | {found['ran']} | 0 |")  # noqa: T201
    return found


def anew(saved: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)


@pytest.mark.parametrize(("name", "every"), [
    ("config.json, whole", 1), ("config.json, fields", 5),
    ("generation_config.json, whole", 2), ("generation_config.json, fields", 11),
    ("tokenizer.json, whole", 2), ("tokenizer.json, fields", 11),
    ("tokenizer_config.json, whole", 2), ("tokenizer_config.json, fields", 5),
    ("weights", 1), ("index", 1),
])  # fmt: skip
@pytest.mark.one_in(4)
def test_a_part(saved: dict[str, Path], folder: Path, name: str, every: int) -> None:
    assert checked(saved, folder, name, every)["refused by name"] > 5


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GROUPS)
def test_all(saved: dict[str, Path], folder: Path, name: str) -> None:
    assert checked(saved, folder, name, 1)["refused by name"] > 5


@pytest.mark.parametrize("way", ["absolute", "upwards", "down and up"])
def test_shards_outside_of_the_folder_are_not_read(
    saved: dict[str, Path], folder: Path, way: str
) -> None:
    anew(saved["index"], folder)
    for attack in GROUPS["index"](folder):
        if way in attack.what:
            attack.act(folder / attack.file)
            with pytest.raises(CheckpointError, match=r"which may lie outside of the folder$"):
                jackfield.load(folder)


def test_a_link_out_of_the_folder_is_followed(saved: dict[str, Path], folder: Path) -> None:
    """As the hub's cache has it; the link is its owner's, not the index's."""
    expected = run(folder)
    anew(saved["index"], folder)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    assert run(folder) == expected


def test_what_the_config_names_as_weights(folder: Path) -> None:
    """`transformers_weights`: a file in the folder, in the one format that runs nothing."""
    expected = run(folder)
    (folder / WEIGHTS).rename(folder / "mine.safetensors")
    name_weights(folder, "mine.safetensors")
    assert run(folder) == expected
    (folder / "mine.safetensors").rename(folder.parent / "mine.safetensors")
    for name, told in {
        "../mine.safetensors": "may lie outside",
        str(folder.parent / "mine.safetensors"): "may lie outside",
        "adapter_model.bin": "is not a safetensors file",
        "mine.safetensors": "is missing",
    }.items():
        name_weights(folder, name)
        with pytest.raises(CheckpointError, match=told):
            run(folder)


def name_weights(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))


class Panic(BaseException):
    """As pyo3 raises what a library in Rust did not expect: no Exception."""


def test_a_tokenizer_that_panics_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*args: Any, **kwargs: Any) -> None:
        raise Panic("called `Option::unwrap()` on a `None` value")

    with jackfield.load(folder) as engine:
        monkeypatch.setattr(type(engine.tokenizer), "__call__", panic)
        with pytest.raises(PromptError, match="the prompt cannot be read: called `Option"):
            engine.generate("abc", max_new_tokens=2)
    with pytest.raises(CheckpointError, match=r"load the tokenizer of .*: called `Option"):
        jackfield.load(folder)


@pytest.mark.parametrize(
    ("vocabulary", "error", "said"),
    [
        ({}, CheckpointError, "has no vocabulary, so every text would be unknown to it"),
        ({"q1": 5, "q2": 6}, PromptError, "the prompt cannot be read: WordLevel error"),
    ],
)
def test_a_tokenizer_without_the_words_of_a_text(
    folder: Path, vocabulary: dict[str, int], error: type[Exception], said: str
) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(error, match=said):
        run(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", WEIGHTS])
def test_the_command_line_says_one_line(
    cli: Any, saved: dict[str, Path], folder: Path, file: str
) -> None:
    for attack in some(GROUPS["config.json, whole"](folder), 9):
        attack.act(folder / file)
        done = cli("generate", "abc", "--model", str(folder), "--max-new-tokens", "2")
        if done.code:
            done.assert_failed(2, "/hostile")
        anew(saved["weights"], folder)

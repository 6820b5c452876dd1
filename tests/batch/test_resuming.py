"""A job goes on as it began, and is refused by name where anything is another."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jobs import Json, asks, done, job, read, write

from jackfield.batch import job as batch_job
from jackfield.batch.job import JobFile
from jackfield.batch.running import Outcome, run
from jackfield.cli.options import Backends
from jackfield.demo import MODEL_PATH
from jackfield.errors import UsageError
from jackfield.serving.settings import ServerSettings

ASKED = Backends().arguments()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", [asks(f"r{at}", max_tokens=2) for at in range(3)])


@pytest.fixture
def output(source: Path, tmp_path: Path) -> Path:
    """That of a job of which the last answer is missing."""
    path = tmp_path / "out.jsonl"
    done(source, path, **ASKED)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    return path


def refused(source: Path, output: Path, said: str, *more: Any, **arguments: Any) -> None:
    """The job is refused, and nothing of it is another then."""
    before = {path: path.read_bytes() for path in output.parent.glob("out*")}
    with pytest.raises(UsageError, match=said):
        done(source, output, *more, **{**ASKED, **arguments})
    assert {path: path.read_bytes() for path in output.parent.glob("out*")} == before


OTHERS: dict[str, Any] = {
    "attn_implementation": "sdpa",
    "cache_implementation": "dynamic",
    "quantization": "none",
    "compile": "none",
    "decoding": "sample",
    "assistant_model": "demo-draft",
    "scheduler": "short-first",
    "kernels": "triton-rms-norm",
    "dtype": "float64",
    "device_map": "cpu",
    "tp_size": 2,
    "expert_parallel": True,
    "max_memory": {"cpu": "4GB"},
    "offload_folder": "folder",
    "adapter": "adapter",
    "merge_adapter": True,
    "adapters": {"a": "adapter"},
    "deterministic": True,
    "locked": "jackfield.lock.json",
    "profile": "profile.toml",
    "revision": "v1",
}


def test_every_argument_is_swept() -> None:
    assert OTHERS.keys() == ASKED.keys()


def test_another_argument_is_refused_by_its_name(source: Path, output: Path) -> None:
    for name, value in OTHERS.items():
        refused(source, output, f"began: .*{name} was .*run it as it began, or", **{name: value})


@pytest.mark.parametrize(
    "answers",
    [
        {"max_completion_tokens": 5},
        {"default_seed": 1},
        {"reasoning": "on"},
        {"chat_template_kwargs": {"a": 1}},
    ],
    ids=lambda answers: str(*answers),
)
def test_another_setting_of_answers_is_refused(source: Path, output: Path, answers: Json) -> None:
    (name,) = answers
    assert name in ServerSettings.model_fields
    refused(source, output, f"{name} was None and is", answers)


def test_another_input_is_refused(source: Path, output: Path) -> None:
    with source.open("a") as file:
        file.write(json.dumps(asks("more")) + "\n")
    refused(source, output, "input was sha256:.* and is sha256:")


def test_a_model_of_another_content_is_refused(source: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "demo", tmp_path / "out.jsonl"
    shutil.copytree(MODEL_PATH, folder)
    own = job(source, output)
    own = type(own)(source, output, str(folder), own.arguments, {})

    def again() -> Outcome:
        return run(own, lambda done, of: None)

    assert again().answered == 3
    assert again().before == 3
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UsageError, match="files of the model was sha256"):
        again()


@pytest.mark.parametrize("argument", ["adapter", "adapters"])
def test_an_adapter_of_another_content_is_refused(
    source: Path, tmp_path: Path, argument: str
) -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    folder, output = tmp_path / "adapter", tmp_path / "out.jsonl"
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(MODEL_PATH), config
    ).save_pretrained(folder)
    given = ASKED | {argument: str(folder) if argument == "adapter" else {"a": str(folder)}}
    assert done(source, output, **given).answered == 3
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UsageError, match=f"files of {re.escape(str(folder))} was sha256"):
        done(source, output, **given)


def test_how_much_runs_at_once_may_be_another(source: Path, output: Path) -> None:
    outcome = done(source, output, **ASKED | {"max_batch_size": 1, "verify": True})
    assert (outcome.before, outcome.answered) == (2, 3)
    assert [line["custom_id"] for line in read(output)] == ["r0", "r1", "r2"]


def changed(output: Path, *path: str, value: Any) -> None:
    file = output.with_name(f"{output.name}.job")
    found = one = json.loads(file.read_text())
    for name in path[:-1]:
        one = one[name]
    one[path[-1]] = value
    file.write_text(json.dumps(found, indent=2) + "\n")


def test_what_was_chosen_is_chosen_again(source: Path, output: Path) -> None:
    found = json.loads(Path(f"{output}.job").read_text())
    assert found["backends"]["cache"]["name"] == "paged"
    changed(output, "backends", "cache", "options", value={
        **found["backends"]["cache"]["options"], "page_size": 8})  # fmt: skip
    assert done(source, output, **ASKED).plan["cache"].options.page_size == 8


def test_other_versions_are_refused(source: Path, output: Path) -> None:
    changed(output, "libraries", "torch", value="1.0")
    refused(source, output, r"library torch was 1.0 and is .*; install what .*, or give another")


@pytest.mark.parametrize(("name", "value"), [("dtype", "float64"), ("device", "cuda")])
def test_another_device_is_refused(source: Path, output: Path, name: str, value: str) -> None:
    changed(output, "batch", "ran", name, value=value)
    refused(source, output, f"{name} was {value} and is")


def test_deterministic_is_for_one_number_of_threads(source: Path, tmp_path: Path) -> None:
    output, threads = tmp_path / "out.jsonl", torch.get_num_threads()
    done(source, output, deterministic=True)
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(UsageError, match=f"threads was {threads} and is {threads + 1}"):
            done(source, output, deterministic=True)
    finally:
        torch.set_num_threads(threads)


def test_two_at_once_are_refused(source: Path, output: Path) -> None:
    with JobFile(Path(f"{output}.job")):
        refused(source, output, "another process works on this job")
    assert done(source, output, **ASKED).answered == 3


def test_a_file_that_another_takes_away_meanwhile_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose job did not begin does, after this one has opened the file."""
    path = tmp_path / "out.jsonl.job"
    for meanwhile in (path.unlink, lambda: (path.unlink(), path.touch())):
        monkeypatch.setattr(batch_job, "_hold", lambda _, act=meanwhile: act() is None or True)
        with pytest.raises(UsageError, match="another process works on this job"):
            JobFile(path)


def test_files_of_no_job_are_refused_and_left(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    endings = ("", ".errors.jsonl", ".writing", ".errors.jsonl.writing")
    for path in (Path(f"{output}{ending}") for ending in endings):
        path.write_text("mine")
        with pytest.raises(UsageError, match=re.escape(f"{path} is there, and is of no job")):
            done(source, output)
        assert path.read_text() == "mine"
        path.unlink()
    file = Path(f"{output}.job")
    for text in ("mine", "{}", '{"batch": 1}\n', '{"batch": {"asked": {}, "ran": {}}}\n'):
        file.write_text(text)
        with pytest.raises(UsageError, match="is not the file of a batch job; give another file"):
            done(source, output)
        assert file.read_text() == text
    file.unlink()
    assert list(tmp_path.iterdir()) == [source]


def test_a_job_killed_while_it_began_begins_anew(source: Path, output: Path) -> None:
    file = Path(f"{output}.job")
    text = file.read_bytes()
    for size in (*range(20), len(text) // 2, len(text) - 1):
        file.write_bytes(text[:size])
        with JobFile(file) as found:
            assert not found.has_begun
        assert not file.exists()
    file.write_bytes(text[:-1])
    with pytest.raises(UsageError, match=r"out.jsonl is there, and is of no job"):
        done(source, output, **ASKED)
    output.unlink()
    file.write_bytes(text[:-1])
    assert done(source, output, **ASKED).answered == 3
    assert done(source, output, **ASKED).before == 3


def test_places_that_are_none_are_told(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match=r"in.jsonl is the input, and would be written"):
        done(source, source)
    for ending in (".job", ".writing", ".errors.jsonl", ".errors.jsonl.writing"):
        for text in ("", "mine"):
            one = tmp_path / f"one{ending}"
            one.write_text(text)
            with pytest.raises(UsageError, match="is the input, and would be written"):
                done(one, tmp_path / "one")
            assert one.read_text() == text
            one.unlink()
    for name in ("o" * 250, "o" * 240):  # too long for the file of a job, or that of errors
        with pytest.raises(UsageError, match="cannot be written: File name too long"):
            done(source, tmp_path / name)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(UsageError, match="loop is not a file"):
        done(loop, output)
    with pytest.raises(UsageError, match="loop is there, and is of no job"):
        done(source, loop)
    loop.unlink()
    with pytest.raises(UsageError, match=r"no.jsonl is not a file; give a file of lines"):
        done(tmp_path / "no.jsonl", output)
    with pytest.raises(UsageError, match="is not a file; give"):
        done(tmp_path, output)
    with pytest.raises(UsageError, match=r"out.jsonl.job cannot be written: No such file"):
        done(source, tmp_path / "no" / "out.jsonl")
    with pytest.raises(UsageError, match="is there, and is of no job"):
        done(source, Path("/dev/null"))
    assert list(tmp_path.iterdir()) == [source]

"""A profile fills what is left open, is wrong in one line, and is never read unless it is named."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jackfield
from jackfield.bridge.source import find
from jackfield.cli import run
from jackfield.errors import UsageError
from jackfield.planning.profile_files import FORMAT, SELECTABLE, read_profile
from jackfield.planning.profile_options import same
from jackfield.planning.profiles import surroundings, taken
from jackfield.planning.toml_text import toml
from jackfield.requests.arguments import OF_LOADING

SELECTIONS: dict[str, Any] = {
    "attn_implementation": "sdpa",
    "cache_implementation": "paged?page_size=32",
    "dtype": "float64",
    "max_batch_size": 3,
}


def written(folder: Path, selections: Any = SELECTIONS, **more: Any) -> Path:
    path = folder / "p.toml"
    path.write_text(toml({"format": FORMAT, "selections": selections, **more}))
    return path


def test_what_is_left_open_is_what_the_profile_says(tmp_path: Path) -> None:
    file = written(tmp_path)
    plan = jackfield.plan("demo", profile=file)
    assert plan["attention"].registered.name == "sdpa"
    assert plan["cache"].options.page_size == 32
    assert plan.requirements.dtype == "float64"
    assert plan["attention"].how == f"from profile {file}"
    assert plan["scheduler"].how == "auto"
    with jackfield.load("demo", profile=str(file), attn_implementation="auto") as engine:
        assert engine.plan["attention"].how == f"from profile {file}"
        assert engine.plan.limits.rows == 3
        assert f"attention: sdpa (from profile {file})" in str(engine.explain())


def test_what_is_named_wins_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jackfield"):
        plan = jackfield.plan("demo", profile=written(tmp_path), attn_implementation="eager")
    assert (plan["attention"].registered.name, plan["attention"].how) == ("eager", "named")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "attn_implementation is as you name it, in place of 'sdpa'" in line


def test_the_same_named_again_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path)
    with caplog.at_level(logging.WARNING, "jackfield"):
        jackfield.plan("demo", profile=file, attn_implementation="sdpa", dtype="float64")
    assert caplog.records == []


def test_nothing_is_read_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path).rename(tmp_path / "profile.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert {c.how for c in jackfield.plan("demo").choices.values()} == {"auto"}


def test_what_is_not_as_it_was_measured_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, config = jackfield.plan("demo"), find("demo", None).config
    made = surroundings(plan, config)
    with caplog.at_level(logging.WARNING, "jackfield"):
        jackfield.plan("demo", profile=written(tmp_path, made=made))
    assert caplog.records == []
    others = {**made, "hardware": "a pocket calculator", "config": "sha256:0", "finished": False}
    others["versions"] = {**made["versions"], "torch": "0.0.1"}
    with caplog.at_level(logging.WARNING, "jackfield"):
        jackfield.plan("demo", profile=written(tmp_path, made=others))
    (line,) = [record.getMessage() for record in caplog.records]
    for said in ("a pocket calculator", "torch 0.0.1", "another config", "did not come to its end"):
        assert said in line
    assert "\n" not in line


def test_another_architecture_is_an_error(tmp_path: Path) -> None:
    file = written(tmp_path, made={"architecture": "GPT2LMHeadModel"})
    with pytest.raises(UsageError, match="is of GPT2LMHeadModel, and this model is LlamaForCausal"):
        jackfield.plan("demo", profile=file)


@pytest.mark.parametrize(
    ("selections", "named", "says"),
    [
        ({"attn_implementation": "no-such"}, {}, "there is no attention 'no-such'"),
        ({"attn_implementation": "flash_attention_2"}, {}, "needs a CUDA GPU"),
        ({"device_map": "cuda"}, {}, "cuda"),
        ({"cache_implementation": "paged"}, {"attn_implementation": "flex_attention"}, "layout"),
    ],
)
def test_what_cannot_run_here_says_whose_it_is(
    tmp_path: Path, selections: dict[str, Any], named: dict[str, Any], says: str
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("here it can")
    file = written(tmp_path, selections)
    with pytest.raises(UsageError, match=says) as caught:
        jackfield.plan("demo", profile=file, **named)
    assert f"(from profile {file}: {', '.join(selections)}; " in str(caught.value)


WRONG = {
    "no TOML": ("format = ", "is not TOML"),
    "no format": ("[selections]\n", "has no format, and this jackfield reads format = 1"),
    "a truth value as format": ("format = true\n[selections]\n", "is of format True"),
    "a fraction as format": ("format = 1.0\n[selections]\n", "is of format 1.0"),
    "another format": ("format = 2\n[selections]\n", "is of format 2"),
    "no selections": ("format = 1\n", r"needs a table \[selections\]"),
    "selections are none": ("format = 1\nselections = 3\n", r"needs a table \[selections\]"),
    "another table": ("format = 1\n[selektions]\n", "no table 'selektions'.*did you mean 'sel"),
    "an argument of nobody": (
        'format = 1\n[selections]\nattention = "sdpa"\n', "selects no 'attention'.*attn_impl",
    ),
    "a model": ('format = 1\n[selections]\nadapter = "x"\n', "selects no 'adapter'"),
    "a size": ("format = 1\n[selections]\nmax_batch_size = 0\n", "at least 1, not 0"),
    "a size in words": ('format = 1\n[selections]\nmax_batch_size = "3"\n', "not '3'"),
    "a number": ("format = 1\n[selections]\nattn_implementation = 3\n", "must be a text.*not 3"),
    "no names": ("format = 1\n[selections]\nkernels = []\n", r"must be a text.*not \[\]"),
    "made": ("format = 1\nmade = 3\n[selections]\n", "made must be a table"),
    "versions": ("format = 1\n[selections]\n[made]\nversions = 3\n", "made.versions"),
    "a version": (
        "format = 1\n[selections]\n[made.versions]\ntorch = {a = 1}\n",
        "made.versions.torch must be a text",
    ),
    "an architecture": (
        'format = 1\n[selections]\n[made]\narchitecture = ["x"]\n',
        "made.architecture must be a text",
    ),
    "hardware": ("format = 1\n[selections]\n[made]\nhardware = 3\n", "made.hardware must be a"),
    "a config": ("format = 1\n[selections]\n[made]\nconfig = 3\n", "made.config must be a text"),
    "finished": ("format = 1\n[selections]\n[made]\nfinished = 0\n", "made.finished must be true"),
    "named": ("format = 1\n[selections]\n[made]\nnamed = 3\n", "made.named must be a table"),
    "a name": (
        "format = 1\n[selections]\n[made.named]\nadapter = [3]\n", "made.named.adapter must be",
    ),
    "a size of nobody": (
        f"format = 1\n[selections]\nmax_batch_size = {10**20}\n", "at most 2147483648, not 100",
    ),
    "a device of lists": ('format = 1\n[selections]\ndevice_map = {a = ["b"]}\n', "must be a text"),
    "a decoding of numbers": ("format = 1\n[selections]\ndecoding = {a = 3}\n", "must be a text"),
    "evidence": ("format = 1\nevidence = [3]\n[selections]\n", "evidence must be tables"),
    "no text": (b"\xff\xfe", "is not TOML"),
    "deep": ("format = " + "[" * 100_000, "is not TOML"),
    "large": ("#" * 1_000_001, "has more than 1000000 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_with_an_error_is_one_line(name: str, tmp_path: Path) -> None:
    content, says = WRONG[name]
    file = tmp_path / "p.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=says) as caught:
        jackfield.plan("demo", profile=file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no profile"):
        read_profile(tmp_path)


#: A value of each that `load` takes, as TOML has it.
VALUES: dict[str, Any] = {
    "attn_implementation": "eager", "cache_implementation": ["paged", "dynamic"],
    "compile": False, "decoding": {"fast": "prompt_lookup"}, "kernels": ["cpu-rms-norm"],
    "quantization": "none", "scheduler": "fifo", "dtype": "float32", "device_map": "cpu",
    "max_batch_size": 2, "max_batch_tokens": 300, "prefill_chunk_size": 16,
}  # fmt: skip


def test_every_argument_that_one_may_have_is_taken(tmp_path: Path) -> None:
    assert VALUES.keys() == set(SELECTABLE) <= OF_LOADING
    with jackfield.load("demo", profile=written(tmp_path, VALUES)) as engine:
        assert [c.how for c in engine.plan.choices.values()].count("auto") == 0
        limits = engine._loop.limits
    assert (limits.max_batch_size, limits.max_batch_tokens) == (2, 300)


WORD = st.text(max_size=5)
ANY = (
    st.booleans() | st.integers() | st.floats() | WORD
    | st.lists(WORD, max_size=2) | st.dictionaries(WORD, WORD, max_size=2)
)  # fmt: skip


@pytest.mark.parametrize("name", SELECTABLE)
def test_any_value_is_read_or_refused(name: str, tmp_path: Path) -> None:
    refused: list[str] = []

    @given(ANY)
    def one(value: Any) -> None:
        try:
            assert read_profile(written(tmp_path, {name: value})).selections.keys() == {name}
        except UsageError as error:
            refused.append(str(error))

    one()
    assert refused
    assert all(name in line and "\n" not in line for line in refused)


FREE = {
    "attn_implementation": [
        "hub?repo=a/b&revision=main",
        "paged|hub?repo=a/b",
        ["sdpa", "hub?repo=a/b"],
    ],
    "kernels": ["hub-layer?repo=a/b&revision=main"],
    "quantization": ["gptq?calibration=/some/file", "plugin:gptq?bits=8&calibration=x"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in FREE.items() for v in vs])
def test_no_profile_names_a_file_or_a_model(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is any text and may name a file or a model; drop it"):
        read_profile(written(tmp_path, {name: value}))


def test_words_and_numbers_are_options_of_a_profile(tmp_path: Path) -> None:
    selections = {
        "attn_implementation": "sdpa?kernel=math",
        "quantization": "int8-cpu?group_size=32",
    }
    assert read_profile(written(tmp_path, selections)).selections == selections


def test_what_a_profile_cannot_name_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(
        tmp_path, {"dtype": "float32"}, made={"named": {"quantization": "gptq?calibration=x"}}
    )
    with caplog.at_level(logging.WARNING, logger="jackfield"):
        jackfield.plan("demo", profile=file)
        assert "quantization='gptq?calibration=x', which you have to name yourself" in caplog.text
        caplog.clear()
        jackfield.plan("demo", profile=file, quantization="none")
        assert "which you have to name yourself" not in caplog.text


NAMED = {
    "adapter": ("a", "b"),
    "deterministic": (True, True),
    "max_memory": ('{"cpu": "4GB"}', {"cpu": "5GB"}),
    "revision": ("main", "x"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_was_named_when_it_was_measured_is_missed(name: str, tmp_path: Path) -> None:
    was, other = NAMED[name]
    file = written(tmp_path, made={"named": {name: was}})
    again = {"max_memory": {"cpu": "4GB"}}.get(name, was)
    says = f"it was measured with {name}={was!r}, which you have to name yourself"
    assert taken({"profile": file}, OF_LOADING)["profile"].apart == (says,)
    assert taken({"profile": file, name: again}, OF_LOADING)["profile"].apart == ()
    if other != was:
        (said,) = taken({"profile": file, name: other}, OF_LOADING)["profile"].apart
        assert said.startswith(f"it was measured with {name}={was!r}, and this is ")
    without = written(tmp_path, made={"named": {}})
    (said,) = taken({"profile": without, name: again}, OF_LOADING)["profile"].apart
    assert said.startswith(f"it was measured without {name}, and this is {name}=")
    nobody_says = written(tmp_path)
    assert taken({"profile": nobody_says, name: again}, OF_LOADING)["profile"].apart == ()


SAME: list[tuple[str, Any, Any]] = [
    ("compile", False, "none"),
    ("compile", True, "inductor"),
    ("compile", "plugin:none", "none"),
    ("device_map", torch.device("cpu"), "cpu"),
    ("device_map", "cpu:0", "cpu"),
    ("device_map", {"": torch.device("cpu")}, {"": "cpu"}),
    ("attn_implementation", "plugin:sdpa", "sdpa"),
    ("attn_implementation", "plugin:jackfield/sdpa", "sdpa"),
    ("attn_implementation", ["sdpa"], "sdpa"),
    ("attn_implementation", "paged|sdpa", "paged|sdpa"),
    ("cache_implementation", "paged?page_size=none", "paged"),
    ("cache_implementation", "paged?swap=no&page_size=8", "paged?page_size=8&swap=false"),
    ("cache_implementation", "hybrid", "static"),
    ("dtype", torch.bfloat16, "bfloat16"),
    ("decoding", {"fast": "plugin:prompt_lookup"}, {"fast": "prompt_lookup"}),
]
APART: list[tuple[str, Any, Any]] = [
    ("compile", True, "none"),
    ("device_map", "cpu", "cuda:0"),
    ("attn_implementation", "eager", "sdpa"),
    ("attn_implementation", "no such", "sdpa"),
    ("attn_implementation", ["sdpa", "eager"], "sdpa"),
    ("cache_implementation", "paged?page_size=32", "paged"),
    ("dtype", torch.float16, "bfloat16"),
    ("max_batch_size", 3, 4),
    ("max_batch_size", 1, True),
    ("attn_implementation", torch.tensor([1, 2]), torch.tensor([1, 2])),  # cannot be told
]


def test_what_means_the_same_is_no_news() -> None:
    for name, one, other in SAME:
        assert same(name, one, other), (name, one, other)
        assert same(name, other, one), (name, one, other)
    for name, one, other in APART:
        assert not same(name, one, other), (name, one, other)


SIZES_APART: list[dict[str, Any]] = [
    {"max_batch_size": 64, "max_batch_tokens": 8},
    {"cache_implementation": "dynamic", "max_batch_tokens": 300},
]


@pytest.mark.parametrize("selections", SIZES_APART)
def test_sizes_that_contradict_each_other_are_of_the_profile(
    selections: dict[str, Any], tmp_path: Path
) -> None:
    file = written(tmp_path, selections)
    for call in (jackfield.plan, jackfield.load):
        with pytest.raises(UsageError, match="max_batch_tokens=") as caught:
            call("demo", profile=file)
        assert f"(from profile {file}: {', '.join(selections)}; " in str(caught.value)


NAMES = st.text(max_size=8)
PLAIN = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text()
TABLES = st.recursive(
    st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=3), max_size=4),
    lambda inner: st.dictionaries(NAMES, PLAIN | inner | st.lists(inner, min_size=1, max_size=2)),
    max_leaves=8,
)


@given(TABLES)
def test_what_is_written_is_read_again(content: dict[str, Any]) -> None:
    assert tomllib.loads(toml(content, "a comment\n\nof lines")) == content


def test_commands_take_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    assert run(["explain", "--profile", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"  from profile {file}: attn_implementation, " in out  # however long the path is
    assert run(["generate", "Hi", "--profile", str(file), "--max-new-tokens", "2"]) == 0
    assert "sdpa" in capsys.readouterr().err
    assert run(["generate", "Hi", "--profile", str(tmp_path / "no.toml")]) == 2
    assert "there is no profile" in capsys.readouterr().err

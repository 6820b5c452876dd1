"""Words of vLLM, SGLang, llama.cpp and TGI are answered; what the answers say to write is taken."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import jackfield
from jackfield import cli
from jackfield.api import LoadArguments, PlanArguments
from jackfield.bridge.devices import ElsewhereError
from jackfield.cli import server_flags
from jackfield.cli.answers import instead_of_flag, with_values
from jackfield.cli.app import app
from jackfield.cli.flag_words import WORDS
from jackfield.cli.server_flags import instead_of_flag_of_server
from jackfield.errors import (
    CheckpointError,
    ExecutionError,
    PlanError,
    SelectionError,
    SettingsError,
    UsageError,
)
from jackfield.planning.keywords import in_our_words, selected
from jackfield.registry.discovery import registry
from jackfield.requests import habits, neutral
from jackfield.requests.habits import FLAGS, KEYWORDS, VALUES
from jackfield.requests.instead import is_neutral, of_loading, of_request
from jackfield.requests.neutral import BOUNDS
from jackfield.requests.other_engines import ATTRIBUTES, LOADING, NAMES, REQUESTS

LOAD = frozenset(LoadArguments.__annotations__) | frozenset(PlanArguments.__annotations__)
COMMANDS: Any = typer.main.get_command(app)


def assignments(answer: str) -> dict[str, Any]:
    """What an answer says to write, as Python reads it: as much as can be read behind "write"."""
    said = answer.partition("write ")[2].replace(" and ", ", ")
    for end in range(len(said), 0, -1):
        with contextlib.suppress(SyntaxError):
            call = ast.parse(f"f({said[:end]})", mode="eval").body
            if isinstance(call, ast.Call) and call.keywords and not call.args:
                return {k.arg or "": eval(ast.unparse(k.value)) for k in call.keywords}  # noqa: S307
    raise AssertionError(answer)


def written(table: Any) -> list[str]:
    return sorted({answer for answer in table.values() if "write " in answer and "=" in answer})


def test_the_words_are_no_words_of_ours() -> None:
    from jackfield.requests.wishes import VOCABULARY

    assert not LOADING.keys() & (LOAD | KEYWORDS.keys())
    assert not REQUESTS.keys() & VOCABULARY
    assert len(LOADING) > 100
    assert len(REQUESTS) > 60
    assert len(written(LOADING)) > 15
    assert len(written(REQUESTS)) > 15


def test_a_word_that_is_given_to_load() -> None:
    words = sorted({*LOADING, *REQUESTS})
    for name, value in itertools.product(words, (object(), None, 7, "x")):
        if value is None and name not in BOUNDS:
            assert in_our_words({name: value}, LOAD, "jackfield.load") == {}
            continue
        with pytest.raises(UsageError) as caught:
            in_our_words({name: value}, LOAD, "jackfield.load")
        said = str(caught.value)
        assert said.startswith(f"jackfield.load takes no {name}")
        answer = of_loading if name in LOADING else of_request
        assert said.endswith(answer(name, value))
        assert "did you mean" not in said


@pytest.fixture(scope="module")
def engine() -> Any:
    with jackfield.load("demo") as found:
        yield found


def test_a_word_that_is_given_to_a_request(engine: Any) -> None:
    for name in sorted({*LOADING, *REQUESTS} - KEYWORDS.keys()):
        with pytest.raises(SettingsError) as caught:
            engine.generate("a", max_new_tokens=1, **{name: 7})
        said = str(caught.value)
        assert name in said
        assert said.endswith((of_request if name in REQUESTS else of_loading)(name, 7))
        assert "did you mean" not in said


@pytest.mark.parametrize("answer", written(LOADING))
def test_what_loading_is_answered_with_is_taken(answer: str) -> None:
    asked = assignments(answer)
    assert asked.keys() <= LOAD
    if "adapter" in asked:  # each of the two is read; there is no such folder
        assert asked.keys() == {"adapter"}
        for one in (asked, {"adapters": {"name": asked["adapter"]}}):
            with pytest.raises(CheckpointError, match="FOLDER"):
                jackfield.plan("demo", **one)
        return
    if "image_hosts" in asked:  # they are read; this model has no use for them
        with pytest.raises(UsageError, match="reads no images"):
            jackfield.load("demo", **asked)
        return
    if asked.keys() <= PlanArguments.__annotations__.keys():
        # names are right; this machine or model may not fit
        with contextlib.suppress(PlanError, ElsewhereError):
            jackfield.plan("demo", **asked)
    else:
        jackfield.load("demo", **asked).close()


@pytest.mark.parametrize("answer", written(REQUESTS))
def test_what_a_request_is_answered_with_is_taken(engine: Any, answer: str) -> None:
    asked = {"max_new_tokens": 8, **({} if "engine." in answer else assignments(answer))}
    if "adapter" in asked:  # it is read; this engine has none
        with pytest.raises(SettingsError, match="loaded without adapters"):
            engine.generate("Say it", **asked)
        return
    found = engine.generate("Say it", **asked)
    assert [c.error for c in found] == [None] * asked.get("num_return_sequences", 1)


def opts(command: str) -> set[str]:
    return {flag for p in COMMANDS.commands[command].params for flag in p.opts}


@pytest.mark.parametrize("command", ["generate", "explain", "chat", "memory"])
def test_the_flags_that_are_answered_are_there(command: str) -> None:
    known, flags = opts(command), 0
    for name in sorted({*LOADING, *REQUESTS} - FLAGS.keys()):
        if f"--{name.replace('_', '-')}" in known:
            continue
        answer = instead_of_flag(f"--{name}", known)
        assert answer, name
        for flag, value in re.findall(r"(--[a-z-]+)(?: ('[^']*'|[\w.=,-]+))?", answer):
            if "`jackfield" in answer:
                continue
            assert flag.replace("--no-", "--") in known, (name, answer)
            flags += 1
            words = [flag, *shlex.split(value)]
            prompt = ["a"] if command == "generate" else []
            COMMANDS.commands[command].make_context(command, [*prompt, *words])
            if flag == "--set" and name not in WORDS:  # of the command line alone
                setting, _, text = words[1].partition("=")
                assert json.loads(text) == assignments(REQUESTS[name])[setting]
    assert flags > 20


@pytest.mark.parametrize(
    ("kind", "theirs"), [(kind, theirs) for kind, names in NAMES.items() for theirs in names]
)
def test_the_name_of_a_backend_is_answered_with_ours(kind: str, theirs: str) -> None:
    with pytest.raises(UsageError) as caught:
        selected({kind: theirs}, registry())
    said = str(caught.value).partition("write ")[2]
    ours = re.findall(r"'([^']*)'", said)
    assert ours
    for name in ours:
        assert name.removeprefix("paged|") in {found.name for found in registry().of_kind(kind)}


@pytest.mark.parametrize(
    "theirs", ["PagedAttention", "paged-attention", "FLASH_ATTN", "FlashInfer"]
)
def test_a_backend_of_others_is_known_however_it_is_spelt(theirs: str) -> None:
    with pytest.raises(SelectionError, match=f"no attention '{theirs}' here: write '"):
        jackfield.plan("demo", attn_implementation=theirs)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for table in (NAMES, habits.NAMES, VALUES) for kind, names in table.items()
     for name in names if isinstance(name, str)],
)  # fmt: skip
def test_a_plugin_may_have_any_of_these_names(kind: str, name: str) -> None:
    class Known:
        def of_kind(self, kind: str) -> Any:
            return [SimpleNamespace(name=name, distribution="strange")]

    found: Any = Known()
    assert selected({kind: name}, found) == {kind: name}


def test_the_cache_of_a_paged_kernel_of_the_hub_is_said_too() -> None:
    with pytest.raises(UsageError) as caught:
        jackfield.plan("demo", attn_implementation="paged|kernels-community/flash-attn2@main")
    said = str(caught.value).partition("kernel of the hub is ")[2]
    call = ast.parse(f"f({said})", mode="eval").body
    assert isinstance(call, ast.Call)
    asked = {k.arg or "": ast.literal_eval(k.value) for k in call.keywords}
    assert asked["cache_implementation"] == "paged"
    with pytest.raises((PlanError, ExecutionError)):  # it is no kernel for this machine
        jackfield.plan("demo", **asked)
    with pytest.raises(UsageError, match=r"names no attention; write 'paged\|sdpa'"):
        jackfield.plan("demo", attn_implementation="paged|")


@pytest.mark.parametrize("theirs", ["half", "fp16", "bf16", "HALF", "float", "double"])
def test_another_name_of_a_dtype_is_answered_with_one_that_is_taken(theirs: str) -> None:
    with pytest.raises(UsageError) as caught:
        jackfield.plan("demo", dtype=theirs)
    (ours,) = re.findall(r"; write '(\w+)'", str(caught.value))
    assert jackfield.plan("demo", dtype=ours).requirements.dtype == ours


NEUTRAL = [
    (name, value)
    for table, words in ((neutral.LOADING, LOADING), (neutral.REQUESTS, REQUESTS))
    for name, values in table.items()
    if name in words
    for value in values
]


def test_a_value_that_asks_for_what_is_so_is_taken(engine: Any) -> None:
    plain = engine.generate("a", max_new_tokens=2)[0].text
    for name, value in NEUTRAL:
        assert in_our_words({name: value}, LOAD, "jackfield.load") == {}, (name, value)
        if name not in KEYWORDS:
            assert engine.generate("a", max_new_tokens=2, **{name: value})[0].text == plain
    assert len(NEUTRAL) > 90
    assert not {name for name, _ in NEUTRAL} & LOAD


@pytest.mark.parametrize("name", [*LOADING, *REQUESTS])
def test_no_value_is_answered_with_the_opposite(name: str) -> None:
    """What says yes or no is told apart: what is so is taken, what is not so is no "always so"."""
    of = of_loading if name in LOADING else of_request
    yes, no = (None if is_neutral(name, value) else of(name, value) for value in (True, False))
    for answer in (yes, no):
        assert answer is None or "it is always so" not in answer
    switched = re.search(r"=no'|'none'|turn it off", no or "")
    if switched and not name.startswith("disable_"):
        assert yes != no, name
    if switched := re.search(r"=no'|turn it off", yes or ""):
        assert name.startswith("disable_"), name


#: word, what was written, what is to be written
TYPED: list[tuple[str, Any, dict[str, Any]]] = [
    ("max_tokens", 3, {"max_new_tokens": 3}),
    ("n", 3, {"num_return_sequences": 3, "temperature": 1.0}),
    ("stop_token_ids", [3], {"eos_token_id": [3]}),
    ("stop_sequences", "x", {"stop": ["x"]}),
    ("temp", 0, {"temperature": 0}),
    ("guided_regex", "[0-9]", {"regex": "[0-9]"}),
    ("guided_choice", ["a", "b"], {"choices": ["a", "b"]}),
    ("structured_outputs", {"regex": "[0-9]"}, {"regex": "[0-9]"}),
    ("structured_outputs", {"choice": ["a"]}, {"choices": ["a"]}),
    ("structured_outputs", {"json": {"type": "null"}}, {"json_schema": {"type": "null"}}),
    ("guided_decoding", {"regex": "a"}, {"regex": "a"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
     {"json_schema": {"type": "null"}}),
    ("response_format", {"type": "json_object"}, {"json_schema": {"type": "object"}}),
    ("gpu_memory_utilization", 0.5, {"cache_implementation": "paged?memory=0.5"}),
    ("tensor_parallel_size", 4, {"tp_size": 4}),
    ("max_num_seqs", 64, {"max_batch_size": 64}),
    ("block_size", 32, {"cache_implementation": "paged?page_size=32"}),
    ("num_gpu_blocks_override", 9, {"cache_implementation": "paged?num_tokens=8192"}),
    ("speculative_config", {"method": "ngram"}, {"decoding": "prompt_lookup"}),
    ("chunked_prefill_size", -1, {"prefill_chunk_size": 512}),
    ("enforce_eager", True, {"compile": "none"}),
    ("torch_compile", False, {"compile": "none"}),
    ("cache_prompt", False, {"cache_implementation": "paged?prefix_sharing=no"}),
    ("n_gpu_layers", 0, {"device_map": "cpu"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "due"), TYPED)
def test_what_was_written_stands_in_the_answer(name: str, value: Any, due: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        in_our_words({name: value}, LOAD, "jackfield.load")
    assert assignments(str(caught.value)) == due


EVERY = sorted({*LOADING, *REQUESTS, *KEYWORDS, *FLAGS, *habits.DECODINGS})


@pytest.mark.parametrize("command", ["generate", "chat", "explain", "memory", "serve"])
def test_a_command_line_is_answered_for_a_command_line(command: str) -> None:
    known = opts(command)
    for name in EVERY:
        flag = f"--{name.replace('_', '-')}"
        if flag in known:
            continue
        for given in (flag, f"--no-{flag[2:]}"):
            said = instead_of_flag(given, known) or ""
            assert "engine." not in said.replace("in Python: engine.generate", ""), (given, said)
            assert "jackfield.load(" not in said, (given, said)


#: flag of a benchmark of others -> ours
BENCHES = {
    "--batch-size": "--batch", "-n": "--new-tokens", "-p": "--prompt-tokens", "-r": "--rounds",
    "--num-prompts": "--requests", "--input-len": "--prompt-tokens",
}  # fmt: skip


@pytest.mark.parametrize("flag", BENCHES)
def test_what_a_benchmark_is_told_is_a_flag_of_ours(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", flag, "4"]) == 2
    assert capsys.readouterr().err.endswith(f"{flag}; write {BENCHES[flag]} N\n")
    assert cli.run(["bench", BENCHES[flag], "x"]) == 2
    assert "valid int" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-cnv", "-no-cnv", "-sys", "-hf", "-r", "--grammar-file"])
def test_flags_of_llama_cpp_are_known_whole(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "hi", flag, "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: No such option: {flag}; ")


def test_drafts_by_n_grams_need_no_model() -> None:
    for flag, value in (
        ("--speculative-config", {"method": "ngram"}),
        ("--speculative-model", "[ngram]"),
    ):
        assert instead_of_flag_of_server(flag, value) == "write --decoding prompt_lookup"


@pytest.mark.parametrize("command", ["generate", "explain", "serve"])
def test_a_flag_that_says_no_is_not_told_to_say_yes(command: str) -> None:
    known = opts(command)
    switches = {name for name, value in NEUTRAL if isinstance(value, bool)}
    switches |= {n for n, h in KEYWORDS.items() if any(isinstance(i, bool) for i in h.inert)}
    for name in sorted(switches):
        flag = name.replace("_", "-")
        yes = instead_of_flag(f"--{flag}", known, value=True)
        no = instead_of_flag(f"--no-{flag}", known)
        assert yes != no or no is None or "write --" not in no, (name, no)
    for flag, due in (
        ("--no-cb-use-cuda-graph", "write --compile none"),
        ("--no-trust-remote-code", "drop it: it is so anyway"),
        ("--no-enforce-eager", "drop it: it is so anyway"),
        ("--no-enable-prefix-caching", "write --cache 'paged?prefix_sharing=no' to turn it off"),
        ("--no-mmap", "weights are always mapped from their files; drop it"),
    ):
        assert instead_of_flag(flag, known) == due


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ("generate hi -n 4", "write --max-new-tokens 4"),
        ("generate hi --n-predict=4", "write --max-new-tokens 4"),
        ("generate hi --temp 0", "write --temperature 0"),
        ("generate hi --kv-cache-dtype auto", "drop it: it is so anyway"),
        ("generate hi --kv-cache-dtype fp8",
         "write --cache 'quantized?nbits=4', or with hqq --cache 'quantized?backend=hqq&nbits=8'"),
        ("generate hi -fa on", "write --attention 'sdpa', or another name"),
        ("generate hi -st", "drop it: `jackfield generate` answers once"),
        ("generate hi --model_path x", "write --model MODEL"),
        ("bench --model-path x", "write --model MODEL"),
        ("generate hi --mirostat 2",
         "there is none; in Python a logits_processor of your own can do it"),
        ("serve demo --mirostat 2", "there is none"),
        ("serve demo --repeat-last-n 64", "there is none"),
        ("serve demo --typical 0.9", "there is none"),
        ("serve demo --no-repeat-ngram-size 3",
         "there is none; in Python: engine.generate(…, no_repeat_ngram_size=…)"),
        ("serve demo --grammar-file x",
         "it is the field grammar of each request, as Lark has them"),
        ("warm demo --parallel 8", "write --rows N"),
        ("warm demo -np 8", "write --rows N"),
        ("warm demo --max-batch-size 8", "write --rows N"),
        ("generate --prompt hi", "the prompt is an argument, without a name"),
        ("generate hi --stream", "drop it: a text is shown as it grows"),
        ("generate hi --gpu-memory-utilization .5",
         "write --cache 'paged?memory=0.9', a share of what is free"),
        ("generate hi --gpu-memory-utilization 0.5",
         "write --cache 'paged?memory=0.5', a share of what is free"),
        ("generate hi --trust-remote-code",
         "there is none: code from a model's repository is never run"),
        ("generate hi --enable-thinking", "write --set enable_thinking=true, or false"),
        ("serve demo --enable-thinking", "write --reasoning off, or on"),
        ("serve demo --skip-special-tokens",
         "there is none; in Python: engine.generate(…, skip_special_tokens=…)"),
        ("serve demo --priority 3", "there is none; in Python: engine.generate(…, priority=…)"),
        ("serve demo --min-p 0.1", "it is a field of each request"),
        ("serve demo --warmup", "drop it: steps that are compiled are so before it answers"),
        ("generate hi --warmup",
         "drop it: nothing is tried before a step comes; `jackfield warm` traces them ahead"),
    ],
)  # fmt: skip
def test_what_stands_behind_a_flag_counts(
    capsys: pytest.CaptureFixture[str], words: str, due: str
) -> None:
    assert cli.run(words.split()) == 2
    assert capsys.readouterr().err.partition("; ")[2] == f"{due}\n"


def test_advice_of_an_engine_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "hi", "--max-new-tokens", "2", "--set", "num_beams=2"]
    assert cli.run(asked) == 2
    said = capsys.readouterr().err
    assert said.endswith("choose a decoding that does: --decoding beam offers one\n")
    assert cli.run([*asked, "--decoding", "beam"]) == 0


@pytest.mark.parametrize(
    ("biases", "written"),
    [
        ({5: -100}, "sequence_bias=[[[5], -100.0]]"),
        ({"5": 1.5, "7": -2}, "sequence_bias=[[[5], 1.5], [[7], -2.0]]"),
        ({"yes": 1}, "sequence_bias=[[[5], 1.0]]"),
    ],
)
def test_biases_are_answered_with_their_own_numbers(biases: Any, written: str) -> None:
    assert of_request("logit_bias", biases) == f"write {written}"


def test_the_page_has_every_word_and_answer() -> None:
    page = (Path(__file__).parents[2] / "docs/coming-from-other-engines.md").read_text()
    parts = page.split("\n## ")[1:]
    for table, part in zip((server_flags.FLAGS, LOADING, REQUESTS), parts, strict=True):
        rows = re.findall(r"^\| (`.*`) \| (.*) \|$", part, re.M)
        found = {name: said for names, said in rows for name in re.findall(r"`(.+?)`", names)}
        assert found == table


@pytest.mark.parametrize("of", ATTRIBUTES)
def test_names_that_modules_and_engines_of_others_have(of: str, engine: jackfield.Engine) -> None:
    ours: Any = engine if "Engine" in of else jackfield
    for name, answer in ATTRIBUTES[of].items():
        with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}: {answer}")):
            getattr(ours, name)
        for word in re.findall(r"engine\.(\w+)", answer):
            assert hasattr(engine, word), answer
        for word in re.findall(r"jackfield\.(\w+)", answer):
            assert hasattr(jackfield, word), answer
    with pytest.raises(AttributeError, match=r"has no attribute 'frobnicate'$"):
        _ = ours.frobnicate


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "seed"])
def test_what_is_meant_by_minus_one(name: str, engine: jackfield.Engine) -> None:
    with pytest.raises(SettingsError, match=rf"{name} must be at least \d, not -1: [a-z0]"):
        engine.generate("Once", **{"do_sample": True, name: -1})
    with pytest.raises(SettingsError, match=rf"{name} must be at least \d, not -2$"):
        engine.generate("Once", **{"do_sample": True, name: -2})


def test_a_property_of_an_engine_that_fails_says_its_own_error() -> None:
    class Failing(jackfield.Engine):
        def __init__(self) -> None:
            pass

        @property
        def chat_format(self) -> Any:
            raise AttributeError("a tokenizer without a template")

    with pytest.raises(AttributeError, match="a tokenizer without a template"):
        _ = Failing().chat_format


@pytest.mark.parametrize(
    "name", ["llama3.2:1b", "demo:latest", "a/b-GGUF:Q4_K_M", "hf.co/a/b:Q8_0"]
)
def test_tags_are_told_before_anything_is_asked_of_a_hub(name: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"has a tag, and there are none here: write the GGUF"
    ):
        jackfield.load(name)


@pytest.mark.parametrize("name", ["C:/models/x", "/no/such:thing/x", "./a:b"])
def test_a_path_with_a_colon_is_no_tag(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        jackfield.load(name)
    assert "has a tag" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf.co/a/b:Q8_0", "write the GGUF file itself, a/b/FILE.gguf"),
        ("a/b:Q8_0", "write the GGUF file itself, a/b/FILE.gguf"),
        ("llama3.2:1b", "write the GGUF file itself, OWNER/REPOSITORY/FILE.gguf"),
    ],
)
def test_where_a_file_would_be_is_told(name: str, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        jackfield.load(name)
    assert said in str(caught.value)


def test_a_value_that_looks_like_a_flag_stays_one() -> None:
    assert with_values(["hi", "--stop", "-st", "-fa", "on"]) == ["hi", "--stop", "-st", "-fa", "on"]
    assert with_values(["hi", "-fa", "on"]) == ["hi", "--flash-attn", "on"]


def test_nothing_is_taken_for_a_word_that_is_not_used(engine: Any) -> None:
    """As configs and clients write out what they do not use; a misspelling is one all the same."""
    for name in LOADING:
        assert in_our_words({name: None}, LOAD, "jackfield.load") == {}, name
    plain = engine.generate("a", max_new_tokens=2)[0].text
    given = {name: None for name in REQUESTS if name not in BOUNDS | set(KEYWORDS)}
    assert engine.generate("a", max_new_tokens=2, **given)[0].text == plain
    for name in BOUNDS:
        with pytest.raises(SettingsError, match="each text has a bound here: write max_new_tokens"):
            engine.generate("a", **{name: None})
    for name in ("system", "guided_choice", "allowed_token_ids", "max_tokens"):
        for value in ("", []):
            with pytest.raises(SettingsError, match=name):
                engine.generate("a", **{name: value})
    with pytest.raises(UsageError, match="max_tokns"):
        engine.generate("a", max_tokns=None)

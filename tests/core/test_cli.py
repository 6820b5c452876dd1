"""The command line: what stands on which stream, exit codes, and one line for every error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jackfield import __version__
from jackfield.cli import output
from jackfield.cli.app import COMMANDS
from jackfield.demo import MODEL_PATH

if TYPE_CHECKING:
    from command_line import Cli
    from conftest import Site

HELLO = "Hello! How can I help you?"


def test_generate_shows_text_and_what_ran(cli: Cli) -> None:
    done = cli("generate", "--chat", "Hello!")
    assert (done.code, done.out) == (0, f"{HELLO}\n")
    assert done.err.count("\n") == 1
    who = rf"\(jackfield {__version__}(, on [^)]+)?\)"
    wanted = rf"attention \w+ {who} \d+ calls · cache .* · decoding .* · scheduler .* · "
    assert re.match(wanted, done.err)
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s\n", done.err)


@pytest.mark.parametrize("flag", ["--attention", "--attn-implementation"])
def test_generate_json_has_completion_and_plan_and_nothing_else(cli: Cli, flag: str) -> None:
    done = cli("generate", "Once upon", "--json", "--max-new-tokens", "2", flag, "eager")
    assert (done.code, done.err) == (0, "")
    assert done.json["finish_reason"] == "length"
    assert done.json["usage"]["completion_tokens"] == len(done.json["token_ids"]) == 2
    assert done.json["plan"]["chosen"]["attention"]["name"] == "eager"
    assert done.json["plan"]["chosen"]["attention"]["how"] == "named"
    assert done.json["report"]["attention"]["calls"] > 0


def test_generate_reads_a_file_or_standard_input(cli: Cli, tmp_path: Path) -> None:
    wanted = cli("generate", "Once upon", "--max-new-tokens", "4").out
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"Once upon\r\n")
    assert cli("generate", "--max-new-tokens", "4", "--file", str(file)).out == wanted
    assert cli("generate", "--max-new-tokens", "4", stdin="Once upon\n").out == wanted


def test_generate_takes_every_setting(cli: Cli) -> None:
    one_by_one = (
        "--temperature 0.9 --top-k 30 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1 --seed 3 "
        "--max-new-tokens 8 --logprobs 2 --stop zzz --stop qqq --json"
    )
    with_set = (
        "--set temperature=0.9 --set top-k=30 --set top_p=0.95 --set min_p=0.01 --set seed=3 "
        "--set repetition_penalty=1.1 --set max_new_tokens=8 --set logprobs=2 "
        '--set stop=["zzz","qqq"] --json'
    )
    first = cli("generate", "Once", *one_by_one.split()).json
    second = cli("generate", "Once", *with_set.split()).json
    assert first["token_ids"] == second["token_ids"]
    assert first["logprobs"] == second["logprobs"]
    assert [len(row["top"]) for row in first["logprobs"]] == [2] * 8


def test_declared_fallbacks_are_tried_in_order(cli: Cli) -> None:
    flags = ("--attention", "eager", "--attention", "sdpa")
    done = cli("generate", "Once", "--max-new-tokens", "1", "--json", *flags)
    chosen = done.json["plan"]["chosen"]["attention"]
    assert (chosen["name"], chosen["how"]) == ("eager", "fallback")


WRONG = {
    "generate": [
        ("hi --max-new-tokens 0", "max_new_tokens must be at least 1"),
        ("hi --temperature -1", "temperature must be at least 0"),
        ("hi --set sequence_bias=[[[1],NaN]]", "sequence_bias for [1] must be"),
        ("hi --set nonsense=1", "there is no setting 'nonsense'"),
        ("hi --set nonsense", "write --set key=value"),
        ("hi --set seed=x", "is not JSON"),
        ("hi --set seed=1 --seed 2", "the setting 'seed' is given twice"),
        ("hi --set num_beams=4", "does not honour num_beams=4"),
        ("hi --logprobs 2", "add --json"),
        ("hi --attention nope", "there is no attention 'nope'"),
        ("hi --attention eager?x=1", "has no option 'x'"),
        ("hi --cache nope", "there is no cache 'nope'"),
        ("hi --decoding nope", "there is no decoding 'nope'"),
        ("hi --dtype int8", "dtype must be"),
        ("hi --device nowhere", "not a device of this machine"),
        ("hi --model ./nowhere", "is not a folder"),
        ("hi --file somewhere", "give one of them"),
        ("--file ./nowhere", "cannot read nowhere: No such file"),
        ("", "there is no prompt"),
        ("hi you", "unexpected extra argument"),
        ("hi --port 3", "it is a flag of `jackfield serve`"),
        ("hi --base-url http://x", "`jackfield chat --server URL` asks a server"),
        ("hi --num-beams 4", "write --decoding 'beam?num_beams=…'"),
        ("hi --load-in-4bit", "write --quantization bnb-4bit"),
        ("hi --max-batch-tokens 0", "max_batch_tokens must be a whole number"),
        ("hi --nope", "No such option"),  # the rest is worded by the version of click
        ("hi --seed x", "Invalid value for '--seed'"),
    ],
    "chat": [("--temperature -1", "temperature must be at least 0")],
    "explain": [("--attention nope", "there is no attention 'nope'")],
    "eval": [
        ("--count 0", "the count must be from 1"),
        ("--count 1001", "the count must be"),
        ("--max-drop 0.1", "--max-drop needs two to compare; add --baseline"),
        ("--baseline attention", "write KIND=NAME"),
        ("--baseline nonsense=x", "write KIND=NAME, with one of"),
        ("--baseline attention=nope", "there is no attention 'nope'"),
        ("--baseline attention=eager --attention eager", "before and after are the same"),
        ("--baseline attention=eager --max-drop -1", "max_drop must be a number, at least 0"),
        ("--no-tasks", "--no-tasks leaves nothing to measure"),
        ("--text ./nowhere", "cannot read nowhere"),
    ],
    "memory": [
        ("./nowhere", "is not a folder"),
        ("--device-memory lots", "must be a size such as 24GB"),
        ("--device-memory 0GB", "must be a size such as 24GB"),
        ("--device-memory -1GB", "must be a size such as 24GB"),
        ("--bandwidth 3TB", "must be a rate such as 80GB/s"),
        ("--bandwidth fast", "must be a rate such as 80GB/s"),
        ("--bandwidth 1GB/s --measure-bandwidth", "give one of them"),
        ("--length -4", "at least 1, not -4"),
        ("--length 513", "more than the model's context of 512"),
        ("--batch 0", "at least 1, not 0"),
        ("--prefill-tokens 0", "prefill_tokens must be a whole number"),
        ("--device nowhere", "not a device of this machine"),
        ("--attention nope", "there is no attention 'nope'"),
        ("--plot x.gif", "cannot draw x.gif: name it"),
        ("--plot nowhere/x.svg", "there is no folder"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "text"), [(c, a, t) for c, rows in WRONG.items() for a, t in rows]
)
def test_a_mistake_is_one_line_and_exit_code_2(
    cli: Cli, command: str, arguments: str, text: str
) -> None:
    cli(command, *arguments.split()).assert_failed(2, text)


def test_an_unknown_command_is_one_line(cli: Cli) -> None:
    cli("generat").assert_failed(2, "No such command 'generat'")


def test_an_empty_prompt_is_one_line(cli: Cli) -> None:
    cli("generate", "").assert_failed(2, "the prompt is empty")
    cli("generate", stdin="").assert_failed(2, "the prompt is empty")


def test_a_prompt_that_is_not_text_is_one_line(cli: Cli) -> None:
    cli("generate", stdin=b"ab\xff").assert_failed(2, "standard input is not UTF-8 text (byte 2)")
    cli("generate", "\udcff").assert_failed(2, "the prompt is not UTF-8 text (byte 0)")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("jackfield.api.load", explode)


@pytest.mark.usefixtures("broken")
def test_the_unexpected_is_one_line_that_names_debug(cli: Cli) -> None:
    done = cli("generate", "hi")
    done.assert_failed(1, "unexpected RuntimeError: first; second; for the traceback run it again")
    assert "jackfield --debug" in done.err


@pytest.mark.usefixtures("broken")
def test_debug_shows_the_traceback(cli: Cli) -> None:
    done = cli("--debug", "generate", "hi")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.err
    assert done.err.endswith("error: unexpected RuntimeError: first; second\n")


def test_debug_says_what_was_chosen(cli: Cli) -> None:
    assert "info: auto chose attention" in cli("--debug", "explain", "--json").err
    assert cli("explain", "--json").err == ""


def test_no_command_shows_help(cli: Cli) -> None:
    done = cli()
    assert (done.code, done.err) == (2, "")
    assert all(f"  {command} " in done.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["60", "200"])
def test_help_has_an_example_and_whole_flags(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = cli(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Example: jackfield {command}" in re.sub(r"\s+", " ", done.out)
    assert "…" not in done.out


def test_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.code, done.out, done.err) == (0, f"jackfield {__version__}\n", "")


def test_plugins(cli: Cli) -> None:
    done = cli("plugins", "--json")
    assert (done.code, done.err, done.json["warnings"]) == (0, "", [])
    rows = {row["entry_point"]: row for row in done.json["plugins"]}
    assert rows["attention-eager"]["backends"] == ["attention:eager"]
    assert rows["attention-eager"]["version"] == __version__
    assert {row["state"] for row in rows.values()} == {"loaded"}
    table = cli("plugins").out
    assert all(name in table for name in rows)


@pytest.fixture
def site_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site whose plugins this process finds."""
    from jackfield.registry import discovery

    monkeypatch.setenv("COLUMNS", "200")
    discovery._made.cache_clear()
    yield site
    discovery._made.cache_clear()


def test_plugins_that_failed_say_why(
    cli: Cli, site_only: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_only.add("bad", "raise RuntimeError('[bold]no[/bold]')")
    site_only.add("off", "")
    monkeypatch.setenv("JACKFIELD_DISABLE", "off,nobody")
    done = cli("plugins")
    assert done.code == 0
    assert re.search(r"bad-ep +bad 1.5 +failed .*RuntimeError: \[bold\]no\[/bold\]", done.out)
    assert re.search(r"off-ep +off 1.5 +disabled +in JACKFIELD_DISABLE", done.out)
    assert done.err == "warning: JACKFIELD_DISABLE names 'nobody', which is not installed\n"


def test_running_warns_of_a_failed_plugin_in_one_line(cli: Cli, site_only: Site) -> None:
    site_only.add("bad", "raise RuntimeError('first\\nsecond')")
    done = cli("generate", "Once", "--max-new-tokens", "1", "--json")
    assert done.code == 0
    assert re.fullmatch(r"warning: plugin bad-ep of bad 1\.5: .*RuntimeError: first.*\n", done.err)
    assert done.json["finish_reason"] == "length"


def test_explain_judges_every_backend(cli: Cli) -> None:
    done = cli("explain", "--attention", "eager", "--json")
    verdicts = {(b["kind"], b["name"]): b for b in done.json["backends"]}
    assert (verdicts["attention", "eager"]["verdict"], verdicts["attention", "eager"]["how"]) == (
        "chosen",
        "named",
    )
    assert verdicts["attention", "sdpa"]["verdict"] == "possible"
    assert verdicts["decoding", "sample"]["how"] == "auto"
    assert done.json["plan"]["chosen"].keys() == {
        "attention", "cache", "compiler", "decoding", "quantizer", "scheduler",
    }  # fmt: skip
    assert "possible" in cli("explain", str(MODEL_PATH), "--attention", "eager").out


def test_explain_shows_options_that_are_not_the_usual_ones(cli: Cli) -> None:
    asked = ("explain", "--quantization", "int8-cpu?activations=int8", "--cache", "paged?swap=true")
    found = {b["name"]: b["options"] for b in cli(*asked, "--json").json["backends"]}
    assert (found["int8-cpu"], found["int4-cpu"], found["paged"]) == (
        "activations=int8",
        "",
        "swap=true",
    )
    assert "named, activations=int8" in cli(*asked).out


FUSSY = """
    def refuse(self, requirements, options):
        return ["needs a harp", "needs a hall"]
"""


def test_explain_shows_every_reason_also_where_nothing_fits(cli: Cli, site_only: Site) -> None:
    site_only.add("fussy", site_only.attention("fussy").replace("    # more\n", FUSSY))
    reasons = ["needs a harp", "needs a hall"]
    for flags, code in (((), 0), (("--attention", "fussy"), 2)):
        done = cli("explain", "--json", *flags)
        verdicts = {(b["kind"], b["name"]): b for b in done.json["backends"]}
        assert verdicts["attention", "fussy"]["verdict"] == "refused"
        assert verdicts["attention", "fussy"]["reasons"] == reasons
        assert done.code == code
    assert done.json["plan"] is None
    assert done.err == f"error: {done.json['error']}\n"
    shown = cli("explain").out
    assert all(shown.count(f" {reason}\n") == 1 for reason in reasons)


def test_doctor(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert done.err == ""
    problems = [f for f in done.json["findings"] if f["state"] == "problem"]
    assert (done.code, done.json["ok"]) == ((1, False) if problems else (0, True))
    assert {"plugins", "libraries", "devices"} <= {f["area"] for f in done.json["findings"]}
    shown = cli("doctor")
    assert shown.code == done.code
    assert "attention-eager of jackfield" in shown.out


def test_doctor_exits_with_1_where_there_is_a_problem(cli: Cli, site_only: Site) -> None:
    site_only.add("bad", "raise RuntimeError('no')")
    done = cli("doctor")
    assert done.code == 1
    assert "JACKFIELD_DISABLE=bad-ep" in done.out


def test_eval(cli: Cli) -> None:
    done = cli("eval", "--count", "1", "--seed", "2", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["total"] == len(done.json["tasks"]) == 7
    assert done.json["plan"]["chosen"]["attention"]["name"]
    assert done.json["report"]["attention"]["calls"] > 0
    shown = cli("eval", "--count", "1", "--seed", "2")
    assert re.search(r"^all +\d +7 ", shown.out, re.MULTILINE)
    assert "7 items in" in shown.err


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": [float("nan"), (float("-inf"), 1.5)]})
    assert capsys.readouterr().out == '{"a": [null, [null, 1.5]]}\n'


def test_a_failed_request_exits_with_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield.engine.requests import Request

    result = Request.result

    def fail(self: Request) -> Any:
        return replace(result(self), finish_reason="error", error="it broke")

    monkeypatch.setattr(Request, "result", fail)
    done = cli("generate", "hi", "--max-new-tokens", "1", "--json")
    assert (done.code, done.err) == (1, "error: it broke\n")
    assert done.json["finish_reason"] == "error"


DRAFTING = ("--decoding", "assisted", "--assistant-model", "demo-draft")


def test_a_draft_model_on_the_command_line(cli: Cli) -> None:
    question = ("--chat", "Sort these numbers: 41 7 88 23")
    plain = cli("generate", *question, "--json").json
    drafted = cli("generate", *question, "--json", *DRAFTING).json
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["report"]["decoding"]["name"] == "assisted"
    assert drafted["report"]["speculation"]["accepted"] > 3
    assert drafted["plan"]["assistant"]["chosen"]["cache"]["name"] == "paged"
    told = cli("generate", *question, *DRAFTING)
    assert told.out == "7 23 41 88\n"
    assert re.search(r"decoding assisted .* drafts right .* tokens a step", told.err)
    assert "decoding sample" not in told.err


def test_explain_shows_the_plan_of_the_draft_model(cli: Cli) -> None:
    done = cli("explain", "demo", *DRAFTING)
    assert done.code == 0
    assert "assistant: LlamaForCausalLM, float32 on cpu" in done.out
    own = cli("explain", "demo", "--decoding", "assisted?assistant_early_exit=6")
    assert "weights: none of its own, the model's first 6 layers" in own.out
    cli("explain", "demo", "--decoding", "assisted").assert_failed(2, "needs a draft model")
    plain = ("--decoding", "sample", "--assistant-model", "demo-draft")
    cli("generate", "x", *plain).assert_failed(2, "none of the decodings")
    cli("generate", "x", *DRAFTING, "--set", "num_assistant_tokens=0").assert_failed(
        2, "at least 1"
    )


def test_eval_with_drafts(cli: Cli) -> None:
    done = cli("eval", "--count", "1", "--json", *DRAFTING)
    assert done.code == 0
    assert done.json["report"]["speculation"]["acceptance_rate"] > 0.3


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("arguments", ["demo", "demo --attention eager", "demo --dtype float64"])
@pytest.mark.one_in(4)
def test_explain_is_readable(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: str, width: int
) -> None:
    """No name is cut, no line too long, each reason there once."""
    monkeypatch.setenv("COLUMNS", str(width))
    out = cli("explain", *arguments.split()).out
    told = cli("explain", *arguments.split(), "--json").json["backends"]
    assert max(map(len, out.splitlines())) <= width
    lines = [line.split() for line in out.splitlines()]
    for backend in told:
        whole = [backend["kind"], backend["name"], backend["verdict"], backend["distribution"]]
        assert [*whole, backend["version"]] in [line[:5] for line in lines]
    reasons = {reason for backend in told for reason in backend["reasons"]}
    numbered = re.split(r"^ +\d+(?: |$)", out.partition("why not")[2], flags=re.M)[1:]
    assert sorted(" ".join(text.split()) for text in numbered) == sorted(
        " ".join(reason.split()) for reason in reasons
    )


@pytest.mark.parametrize("width", [80, 120])
def test_plugins_is_readable(
    cli: Cli, site_only: Site, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name = "a-very-long-name-of-a-strangers-own-distribution-which-nobody-may-cut"
    site_only.add(name, site_only.attention("long-name-of-an-attention-that-is-nowhere-cut-either"))
    site_only.add("bad", "raise RuntimeError('so many words that they take several lines ' * 4)")
    out = cli("plugins").out
    assert max(map(len, out.splitlines())) <= width
    words = out.split()
    for record in cli("plugins", "--json").json["plugins"]:
        assert {record["entry_point"], record["distribution"], *record["backends"]} <= set(words)
    assert " ".join(words).count("so many words that they take several lines") == 4


@pytest.mark.parametrize("command", ["explain", "memory", "warm", "lock", "trace"])
@pytest.mark.parametrize(
    "named", [[""], ["--model", ""], ["-m", ""]], ids=["place", "long", "short"]
)
def test_an_empty_name_of_a_model_is_no_demo(cli: Cli, command: str, named: list[str]) -> None:
    """Such as that of a variable that is not set."""
    cli(command, *named).assert_failed(2, "the model's name is empty")


@pytest.mark.parametrize("command", ["explain", "memory", "warm", "lock", "trace", "tune", "chat"])
def test_two_names_of_a_model_are_refused(cli: Cli, command: str) -> None:
    done = cli(command, "demo", "--model", "other")
    done.assert_failed(2, "demo and --model other name two models; give one")

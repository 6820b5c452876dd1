"""Tools, calls and thoughts on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from saying import TOOLS
from tool_models import NOW, THINKING, answering, model_of

from jackfield.cli.speech import Remembered, Speech
from jackfield.parsing.said import ToolCallDelta

if TYPE_CHECKING:
    from command_line import Cli

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
ANSWERS = {
    "Rain?": f"<think>I look.</think>Let me see.\n{WEATHER}\n{NOW}",
    "noon": "Yes, at noon.",
    "Hello!": "Hi.",
    "Think!": "<think>For ever",
    "Odd?": '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
    "Cut?": '<tool_call>\n{"name": "weather", "arguments": {"city": "Ber',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    for part in model_of(THINKING):
        part.save_pretrained(found)
    (found / "tools.json").write_text(json.dumps(TOOLS))
    return found


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return answering(monkeypatch, ANSWERS)


def flags(folder: Path) -> list[str]:
    return ["--model", str(folder), "--tools", str(folder / "tools.json")]


SHOWN = 'Let me see.\nweather {"city": "Bergen"}\nnow {}\n'


@pytest.mark.usefixtures("prompts")
def test_generate_shows_calls_and_thoughts(cli: Cli, folder: Path) -> None:
    done = cli("generate", "--chat", "Rain?", *flags(folder))
    assert (done.code, done.out) == (0, SHOWN)
    assert done.err.startswith("I look.\nattention ")
    done = cli("generate", "--chat", "Cut?", *flags(folder))
    assert (done.code, done.out) == (0, 'weather {"city": "Ber\n')
    odd = cli("generate", "--chat", "Odd?", *flags(folder))
    assert (odd.code, odd.out) == (0, ANSWERS["Odd?"] + "\n")


@pytest.mark.usefixtures("prompts")
def test_json_has_calls_and_thoughts(cli: Cli, folder: Path) -> None:
    found = cli("generate", "--json", "--chat", "Rain?", *flags(folder)).json
    assert found["text"] == ANSWERS["Rain?"]
    assert (found["content"], found["reasoning"]) == ("Let me see.", "I look.")
    assert [(call["name"], call["arguments"]) for call in found["tool_calls"]] == [
        ("weather", {"city": "Bergen"}), ("now", {}),
    ]  # fmt: skip
    cut = cli("generate", "--json", "--chat", "Cut?", *flags(folder)).json
    assert [(c["arguments"], c["text"]) for c in cut["tool_calls"]] == [(None, '{"city": "Ber')]
    assert "content" not in cli("generate", "--json", "Rain?", "-m", str(folder)).json


def test_chat_takes_results_of_calls(cli: Cli, folder: Path, prompts: list[Any]) -> None:
    """The lines after calls are their results, until all have one."""
    done = cli("chat", *flags(folder), stdin="Rain?\nrain\nnoon\nHello!\n")
    assert (done.code, done.out) == (0, f"{SHOWN}Yes, at noon.\nHi.\n")
    assert done.err.splitlines()[0] == "I look."
    _, first, second, third = prompts
    assert first == [{"role": "user", "content": "Rain?"}]
    user, called, rain, noon = second
    assert user == first[0]
    calls = called["tool_calls"]
    assert called["reasoning_content"] == "I look."
    assert [rain["content"], noon["content"]] == ["rain", "noon"]
    assert [rain["name"], noon["name"]] == ["weather", "now"]
    assert [rain["tool_call_id"], noon["tool_call_id"]] == [call["id"] for call in calls]
    assert third[:4] == second
    assert [m["content"] for m in third[4:]] == ["Yes, at noon.", "Hello!"]


def test_reset_forgets_calls_that_wait(cli: Cli, folder: Path, prompts: list[Any]) -> None:
    done = cli("chat", *flags(folder), stdin="Rain?\nrain\n/reset\nHello!\n")
    assert done.out == f"{SHOWN}Hi.\n"
    assert prompts[-1] == [{"role": "user", "content": "Hello!"}]


def test_a_thought_alone_is_no_answer(cli: Cli, folder: Path, prompts: list[Any]) -> None:
    done = cli("chat", *flags(folder), stdin="Think!\nHello!\n")
    assert done.out == "Hi.\n"
    assert done.err.startswith("For ever\n")
    assert prompts[-1] == [{"role": "user", "content": "Hello!"}]


def test_what_a_template_reads_can_be_set(cli: Cli, folder: Path, prompts: list[Any]) -> None:
    thinks = 'chat_template_kwargs={"thinks": true}'
    found = cli("generate", "--json", "--chat", "Hello!", "-m", str(folder), "--set", thinks).json
    assert (found["content"], found["reasoning"]) == ("", "Hi.")
    goes_on = "continue_final_message=true"
    assert cli("generate", "--chat", "Hello!", "-m", str(folder), "--set", goes_on).code == 0
    nothing = cli(
        "generate", "--chat", "Hello!", "-m", str(folder), "--set", 'documents=[{"a": 1}]'
    )
    nothing.assert_failed(2, "documents[0]: the chat template does not read it")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff", "is not UTF-8 text (byte 0)"),
        (b"{}", "tools must be a list, not {}"),
        (b"[1]", "tools[0] must be an object of JSON, not 1"),
        (b'[{"type": "function"}]', "tools[0] must be like"),
        (b'[{"name": "f", "parameters": 3}]', "tools[0].parameters must be a JSON schema"),
    ],
)
@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "Hello!"]])
def test_files_that_hold_no_tools(
    cli: Cli, folder: Path, tmp_path: Path, command: list[str], text: bytes, why: str
) -> None:
    file = tmp_path / "tools.json"
    file.write_bytes(text)
    done = cli(*command, "--model", str(folder), "--tools", str(file), stdin="Hello!\n")
    done.assert_failed(2, why)


def test_tools_are_told_in_one_place(cli: Cli, folder: Path) -> None:
    own = flags(folder)
    done = cli("generate", "--chat", "Hello!", *own, "--set", "tools=[]")
    done.assert_failed(2, "the setting 'tools' is given twice")
    cli("generate", "Hello!", *own).assert_failed(2, "tools is about chat messages")
    missing = cli("chat", "--tools", str(folder / "none.json"), stdin="Hello!\n")
    missing.assert_failed(2, "cannot read")
    demo = cli("chat", "--tools", str(folder / "tools.json"), stdin="Hello!\n")
    demo.assert_failed(2, "tools[0]: the chat template does not read it")


def test_a_form_that_is_not_known_is_told(cli: Cli, folder: Path, tmp_path: Path) -> None:
    for part in model_of(THINKING.replace("tool_call>", "odd>")):
        part.save_pretrained(tmp_path)
    own = ["--model", str(tmp_path), "--tools", str(folder / "tools.json"), "--max-new-tokens", "2"]
    for command in (["generate", "--chat", "Hello!"], ["chat"]):
        done = cli(*command, *own, stdin="Hello!\n")
        done.assert_failed(2, "the chat template writes tool calls in no form that is known here")
    found = cli("generate", "--json", "--chat", "Hello!", *own).json
    assert "content" in found
    assert "tool_calls" not in found


def test_lines_end_where_something_else_begins(capsys: pytest.CaptureFixture[str]) -> None:
    speech = Speech()
    speech.show("a", "")
    speech.show("b\x1b[2J", "")
    speech.show("", "c", [ToolCallDelta(0, "x", "f", "{")])
    speech.show("", "", [ToolCallDelta(0, text="}", ended=True), ToolCallDelta(1, "y", "g", "{")])
    speech.show("d", "e")
    speech.end()
    shown = capsys.readouterr()
    assert shown.out == "c\nf {}\ng {e\n"
    assert shown.err.replace("\x1b", "") == "ab[2J\nd\n"
    assert speech.text == "ce"


def test_what_is_not_answered_is_forgotten_whole() -> None:
    past = Remembered()
    assert past.told("a")
    past.said({"role": "assistant", "content": "b"})
    assert past.told("c")
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": {}}}
    past.said({"role": "assistant", "content": None, "tool_calls": [call, call]})
    assert past.asks == "f> "
    assert not past.told("d")
    assert past.told("e")
    past.said(None)
    assert [message["content"] for message in past.messages] == ["a", "b"]
    assert past.asks == "> "

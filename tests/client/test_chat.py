"""`jackfield chat --server`: the same conversation, and one line for each way it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from fakes import DONE, END, HEAD, Fake, Script, Step, counted, event, models, plain, said

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Cli

Start = Callable[[Script], Fake]


def asked(answer: list[Step], *names: str) -> Script:
    return lambda path, body: models(*(names or ("m",))) if path == "/v1/models" else answer


WHOLE: list[Step] = [HEAD, said("Hel"), said("lo!", "stop"), counted(3, 2), DONE, END]


def test_the_whole_conversation_is_sent_until_reset(cli: Cli, fake: Start) -> None:
    server = fake(asked(WHOLE))
    flags = [
        "--max-new-tokens",
        "9",
        "--temperature",
        "0.5",
        "--seed",
        "3",
        "--stop",
        "x",
        "--set",
        "nope={}",
    ]
    done = cli("chat", "--server", server.url, *flags, stdin="one\n\ntwo\n/reset\nthree\n/exit\n4")
    assert (done.code, done.out) == (0, "Hello!\n" * 3)
    assert done.err == "the conversation is forgotten\n"
    bodies = server.bodies[1:]
    texts = [[message["content"] for message in body["messages"]] for body in bodies]
    assert texts == [["one"], ["one", "Hello!", "two"], ["three"]]
    own = {"model": "m", "max_tokens": 9, "temperature": 0.5, "seed": 3, "stop": ["x"], "nope": {}}
    assert {**bodies[0], **own} == bodies[0]


def test_greedy_is_temperature_zero(cli: Cli, fake: Start) -> None:
    server = fake(asked(WHOLE))
    cli("chat", "m", "--server", server.url, "--no-do-sample", stdin="one")
    assert server.bodies[0]["temperature"] == 0
    flags = ("--no-do-sample", "--temperature", "1")
    cli("chat", "m", "--server", server.url, *flags, stdin="x").assert_failed(2, "contradict")


def test_a_key_is_sent_and_not_shown(
    cli: Cli, fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(asked(WHOLE))
    cli("chat", "--server", server.url, "--api-key", "sk-1", stdin="one")
    monkeypatch.setenv("JACKFIELD_API_KEY", "sk-2")
    cli("chat", "--server", server.url, stdin="one")
    keys = [head.partition("uthorization: ")[2].split("\r")[0] for head in server.heads]
    assert keys == ["Bearer sk-1"] * 2 + ["Bearer sk-2"] * 2
    refused = fake(lambda *_: plain("401 No", {"error": {"message": "no such key"}}))
    done = cli("chat", "--server", refused.url, stdin="one")
    done.assert_failed(2, "wants an API key: no such key; give --api-key")
    assert "sk-2" not in done.err


def test_an_old_server_says_nothing_about_usage(cli: Cli, fake: Start) -> None:
    def script(path: str, body: dict[str, Any]) -> list[Step]:
        if "stream_options" in body:
            return plain("400 No", {"error": {"message": "unknown field stream_options"}})
        return WHOLE

    server = fake(script)
    assert cli("chat", "m", "--server", server.url, stdin="one\ntwo").out == "Hello!\n" * 2
    assert ["stream_options" in body for body in server.bodies] == [True, False, False]


def test_cuts_are_told(cli: Cli, fake: Start) -> None:
    cut: list[Step] = [HEAD, said("He", "length"), counted(9, 2), DONE, END]
    server = fake(asked(cut))
    done = cli("chat", "--server", server.url, "--max-new-tokens", "2", stdin="one")
    assert done.err == "(cut after 2 tokens; --max-new-tokens allows more)\n"
    done = cli("chat", "--server", server.url, stdin="one")
    assert "(cut after 2 tokens: the model's context is full, or" in done.err


def test_reasoning_goes_to_standard_error(cli: Cli, fake: Start) -> None:
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hmm"}}])
    done = cli("chat", "--server", fake(asked([HEAD, thought, *WHOLE[1:]])).url, stdin="one")
    assert (done.out, done.err) == ("Hello!\n", "hmm\n")


LONG = plain("400 Bad", {"error": {"message": "too long", "code": "context_length_exceeded"}})
FAILURES: dict[str, tuple[Script, int, str]] = {
    "model": (
        lambda path, _: models("a", "b") if path == "/v1/models" else
        plain("404 No", {"error": {"message": "none", "code": "model_not_found"}}),
        2, "there is no model 'm' at http://127.0.0.1:PORT/v1; there are a, b",
    ),
    "page": (
        lambda *_: plain("200 OK", b"<html>", "text/html"),
        2, "does not speak OpenAI's protocol: it answered 200 with text/html",
    ),
    "nothing there": (
        lambda *_: plain("404 No", b"<html>", "text/html"),
        2, "does not speak OpenAI's protocol: it answered with status 404",
    ),
    "elsewhere": (
        lambda *_: plain("404 No", {"detail": "Not Found"}), 2, "refuses (404): Not Found",
    ),
    "field": (
        lambda *_: plain("400 Bad", {"error": {"message": "top_k: no\nsuch"}}),
        2, r"refuses (400): top_k: no\nsuch",
    ),
    "busy": (
        lambda *_: plain("429 Busy", {"error": {"message": "queue"}}),
        1, "cannot answer now (429): queue",
    ),
    "error in the stream": (
        lambda *_: [HEAD, event(error={"message": "the engine died"}), DONE, END],
        1, "the engine died",
    ),
    "no protocol": (lambda *_: [HEAD, event(x=1), END], 1, "was cut off"),
    "no events": (lambda *_: [HEAD, END], 1, "was cut off"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_what_goes_wrong_is_one_line(cli: Cli, fake: Start, kind: str) -> None:
    script, code, text = FAILURES[kind]
    server = fake(script)
    done = cli("chat", "m", "--server", server.url, stdin="one")
    done.assert_failed(code, text.replace("PORT", server.url.split(":")[2].split("/")[0]))


def test_a_stream_that_is_cut_off_has_shown_what_came(cli: Cli, fake: Start) -> None:
    done = cli("chat", "m", "--server", fake(asked([HEAD, said("Hel"), b""])).url, stdin="one")
    assert (done.code, done.out) == (1, "Hel\n")
    assert "was cut off" in done.err
    assert done.err.count("\n") == 1


def test_no_server_is_one_line(cli: Cli) -> None:
    done = cli("chat", "m", "--server", "127.0.0.1:9", stdin="one")
    done.assert_failed(2, "nothing answers at http://127.0.0.1:9/v1: ")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://x", "is no address of a server; write http://"),
        ("http://", "is no address of a server; write http://"),
        ("http://x:99999", "is no address of a server: "),
        ("http://me:secret@x", "has a host, a port and a path and nothing else"),
        ("http://x/v1?key=1", "has a host, a port and a path and nothing else"),
    ],
)
def test_addresses_are_checked(cli: Cli, url: str, text: str) -> None:
    cli("chat", "m", "--server", url, stdin="one").assert_failed(2, text)


def test_one_of_several_models_is_to_be_named(cli: Cli, fake: Start) -> None:
    server = fake(asked(WHOLE, "a", "b"))
    cli("chat", "--server", server.url, stdin="x").assert_failed(2, "there are a, b; name one")
    assert cli("chat", "-m", "b", "--server", server.url, stdin="x").code == 0
    assert server.bodies[-1]["model"] == "b"


def test_flags_about_engines_are_not_for_servers(cli: Cli, fake: Start) -> None:
    server = fake(asked(WHOLE))
    for flag in ("--attention sdpa", "--dtype float32", "--max-batch-size 3", "--verify"):
        done = cli("chat", "--server", server.url, *flag.split(), stdin="x")
        done.assert_failed(2, f"{flag.split()[0]} is for the server to say")
    assert server.bodies == []


def test_a_conversation_that_is_too_long_can_be_reset(cli: Cli, fake: Start) -> None:
    def script(path: str, body: dict[str, Any]) -> list[Step]:
        return LONG if len(body["messages"]) > 1 else WHOLE

    server = fake(script)
    done = cli("chat", "m", "--server", server.url, stdin="one\ntwo\n/reset\nthree")
    assert (done.code, done.out) == (0, "Hello!\n" * 2)
    error, hint, forgotten = done.err.splitlines()
    assert error == "error: too long"
    assert "no longer fits into the model's context; /reset starts afresh" in hint
    assert forgotten == "the conversation is forgotten"


def test_ctrl_c_stops_an_answer_and_the_server(
    cli: Cli, fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackfield.client import talking

    server = fake(lambda path, body: [HEAD, said("Hel"), said("lo"), 30.0]
                  if len(body["messages"]) == 1 else WHOLE)  # fmt: skip
    read = talking.piece_of

    def interrupt(data: str) -> Any:
        piece = read(data)
        if piece.text == "lo":
            raise KeyboardInterrupt
        return piece

    monkeypatch.setattr(talking, "piece_of", interrupt)
    done = cli("chat", "m", "--server", server.url, stdin="one\ntwo\n")
    assert (done.code, done.out, done.err) == (0, "Hel\nHello!\n", "(stopped)\n")
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["one", "Hel", "two"]


def _called(**call: Any) -> Step:
    return event(choices=[{"index": 0, "delta": {"tool_calls": [call]}}])


def test_calls_are_shown_and_answered(cli: Cli, fake: Start, tmp_path: Path) -> None:
    """What stands between their pieces, and who leaves out what, is for each server to say."""
    first = {"name": "weather", "arguments": '{"city":'}
    calls: list[Step] = [
        HEAD, said("Let me see."),
        _called(index=0, id="i", type="function", function=first),
        _called(index=0, function={"arguments": ' "Bergen"}'}),
        _called(index=1, id="j", function={"name": "now", "arguments": "{}"}),
        _called(index=2, id="k", function={"name": "now", "arguments": '{"half'}),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]), DONE, END,
    ]  # fmt: skip

    def script(path: str, body: dict[str, Any]) -> list[Step]:
        return calls if len(body["messages"]) == 1 else WHOLE

    server, file = fake(script), tmp_path / "tools.json"
    file.write_text('[{"type": "function", "function": {"name": "now"}}]')
    flags = ["chat", "m", "--server", server.url, "--tools", str(file)]
    done = cli(*flags, stdin="Rain?\nrain\nnoon\n")
    shown = 'Let me see.\nweather {"city": "Bergen"}\nnow {}\nnow {"half\n'
    assert (done.code, done.out, done.err) == (0, f"{shown}Hello!\n", "")
    asked, answered = server.bodies
    assert asked["tools"] == [{"type": "function", "function": {"name": "now"}}]
    _, message, *results = answered["messages"]
    found = [(call["id"], call["function"]) for call in message["tool_calls"]]
    assert found == [
        ("i", {"name": "weather", "arguments": '{"city": "Bergen"}'}),
        ("j", {"name": "now", "arguments": "{}"}),
    ]
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", "i", "rain"), ("tool", "j", "noon"),
    ]  # fmt: skip

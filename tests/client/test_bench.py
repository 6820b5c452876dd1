"""`jackfield bench serve`: its flags, its table and its JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes import DONE, END, HEAD, Fake, Script, Step, counted, event, models, plain, said

if TYPE_CHECKING:
    from command_line import Cli

Start = Callable[[Script], Fake]


def answer(path: str, body: dict[str, Any]) -> list[Step]:
    """Every character of a prompt is a token, and a chat has five more."""
    if path == "/v1/models":
        return models("m")
    if path == "/v1/completions":
        tokens = len(body["prompt"])
        return [HEAD, event(choices=[{"text": "a", "index": 0}]), counted(tokens, 2), DONE, END]
    tokens = len(body["messages"][0]["content"]) + 5
    return [HEAD, said("a"), said("b", "stop"), counted(tokens, 2), DONE, END]


def test_each_load_is_a_row(cli: Cli, fake: Start) -> None:
    server = fake(answer)
    flags = ["--concurrency", "1,3", "--requests", "6", "--warm-up", "2", "--ttft-bound", "60"]
    done = cli("bench", "serve", "--url", server.url, *flags)
    assert done.code == 0
    first = done.out.splitlines()
    assert first[0].split() == ["clients", "requests/s", "good/s", "tokens/s", "failed"]
    assert [line.split()[0] for line in first[1:3]] == ["1", "3"]
    assert [line.split()[-1] for line in first[1:3]] == ["0", "0"]
    assert "1: 6 requests in" in done.err


def test_prompts_are_different_and_greedy(cli: Cli, fake: Start) -> None:
    server = fake(answer)
    flags = ["--concurrency=1,3", "--requests=40", "--warm-up=4", "--max-tokens=7", "--set=top_k=3"]
    cli("bench", "serve", "--url", server.url, *flags)
    bodies = server.bodies[2:]  # after the list of models and the look
    assert len(bodies) == 2 * 44
    assert len({body["messages"][0]["content"] for body in bodies}) > 70
    for body in bodies:
        assert (body["max_tokens"], body["temperature"], body["top_k"]) == (7, 0, 3)
        assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    again = fake(answer)
    cli("bench", "serve", "--url", again.url, *flags)
    texts = [[b["messages"][0]["content"] for b in s.bodies[2:46]] for s in (server, again)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_prompts_have_as_many_tokens_as_asked(cli: Cli, fake: Start, endpoint: str) -> None:
    server = fake(answer)
    flags = f"--endpoint {endpoint} --prompt-tokens 600 --concurrency 2 --requests 20".split()
    done = cli("bench", "serve", "--url", server.url, "--json", *flags)
    (load,) = done.json["loads"]
    assert load["prompt_tokens"]["p50"] == pytest.approx(600, rel=0.1)
    assert (load["requests"], load["failed"], load["tokens"]) == (20, 0, 40)
    assert done.json["model"] == "m"


def test_prompts_of_a_file_are_used_in_order(cli: Cli, fake: Start, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\n  two \nthree\n")
    server = fake(answer)
    flags = ["--concurrency", "1", "--requests", "4", "--warm-up", "0", "--endpoint", "completions"]
    cli("bench", "serve", "--url", server.url, "--prompts", str(file), *flags)
    assert [body["prompt"] for body in server.bodies[2:]] == ["one", "two", "three", "one"]


def test_failures_stand_in_the_table(cli: Cli, fake: Start) -> None:
    asked = 0

    def script(path: str, body: dict[str, Any]) -> list[Step]:
        nonlocal asked
        asked += 1
        if asked > 4:
            return plain("429 Busy", {"error": {"message": "m", "code": "queue_full"}})
        return answer(path, body)

    flags = ["--concurrency", "1", "--requests", "4", "--warm-up", "0"]
    done = cli("bench", "serve", "--url", fake(script).url, *flags)
    assert done.out.splitlines()[1].endswith("2 (2 429 queue_full)")


WRONG = [
    ("--concurrency 0", "each must be above 0"),
    ("--concurrency 1,x", "write --concurrency 1,8,32"),
    ("--concurrency 1 --rate 2", "give one"),
    ("--rate -1", "each must be above 0"),
    ("--requests 0", "--requests must be above 0"),
    ("--duration -1", "--duration must be above 0"),
    ("--warm-up -1", "--warm-up must be at least 0"),
    ("--set x", "write --set key=value"),
    ("--prompts ./nowhere", "cannot read nowhere"),
    ("--prompt-tokens 0", "--prompt-tokens must be above 0"),
    ("--url ftp://x", "is no address of a server"),
    ("--endpoint nope", "Invalid value for '--endpoint'"),
]


@pytest.mark.parametrize(("flags", "text"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_flags_are_one_line(cli: Cli, fake: Start, flags: str, text: str) -> None:
    url = () if "--url" in flags else ("--url", fake(answer).url)
    cli("bench", "serve", *url, *flags.split()).assert_failed(2, text)


def test_a_server_that_cannot_be_measured_is_one_line(cli: Cli, fake: Start) -> None:
    page = fake(lambda *_: plain("200 OK", b"<html>", "text/html"))
    cli("bench", "serve", "--url", page.url).assert_failed(2, "does not speak OpenAI's protocol")
    silent = fake(lambda path, body: [HEAD, said("a", "stop"), DONE, END])
    flags = ("--model", "m", "--prompt-tokens", "50")
    cli("bench", "serve", "--url", silent.url, *flags).assert_failed(2, "give a file of prompts")


def test_a_prompt_cannot_be_shorter_than_its_template(cli: Cli, fake: Start) -> None:
    def script(path: str, body: dict[str, Any]) -> list[Step]:
        words = len(body["messages"][0]["content"].split())
        return [HEAD, said("a"), counted(100 + words, 1), DONE, END]

    flags = ("--model", "m", "--prompt-tokens", "50")
    done = cli("bench", "serve", "--url", fake(script).url, *flags)
    done.assert_failed(2, "--prompt-tokens 50: the least prompt here has about 101")

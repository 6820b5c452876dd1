"""`jackfield chat`: what it remembers, when it says that the context is full, and Ctrl-C."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from command_line import Cli

HELLO = "Hello! How can I help you?"


def test_chat_remembers_until_reset(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackfield.engine.engine import Engine

    seen = []
    stream = Engine.stream

    def watch(self: Engine, prompt: Any, **settings: Any) -> Any:
        seen.append([message["content"] for message in prompt])
        return stream(self, prompt, **settings)

    monkeypatch.setattr(Engine, "stream", watch)
    done = cli("chat", stdin="Hello!\n\nHi\n/reset\nHello!\n/exit\nnever\n")
    assert done.code == 0
    assert done.out.splitlines()[0] == done.out.splitlines()[2] == HELLO
    assert seen[1:] == [["Hello!"], ["Hello!", HELLO, "Hi"], ["Hello!"]]
    assert "the conversation is forgotten" in done.err


def test_chat_says_when_the_context_is_full(cli: Cli) -> None:
    question = "Copy this text: " + "one two three four five six seven eight nine ten " * 8
    done = cli("chat", stdin=f"Hello!\n{question * 9}\n/reset\nHello!")
    assert done.code == 0
    assert done.out == f"{HELLO}\n{HELLO}\n"
    error, hint, forgotten = done.err.splitlines()
    assert re.match(r"error: the prompt has \d+ tokens, the model's context is \d+", error)
    assert hint.endswith("no longer fits into the model's context; /reset starts afresh")
    assert forgotten == "the conversation is forgotten"


def test_chat_says_that_an_answer_was_cut(cli: Cli) -> None:
    done = cli("chat", "--max-new-tokens", "3", stdin="Hello!")
    assert done.err == "(cut after 3 tokens; --max-new-tokens allows more)\n"


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ctrl-C after the first piece of every second answer; the prompts that were asked."""
    from jackfield.engine.engine import Engine

    prompts: list[Any] = []
    stream = Engine.stream

    def interrupt(self: Engine, prompt: Any, **settings: Any) -> Any:
        deltas = stream(self, prompt, **settings)
        prompts.append(list(prompt))
        return stop(deltas) if len(prompts) % 2 == 0 else deltas

    def stop(deltas: Any) -> Iterator[Any]:
        for delta in deltas:
            yield delta
            if delta.text:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupt)
    return prompts


def test_ctrl_c_stops_an_answer_and_not_the_chat(cli: Cli, interrupted: list[Any]) -> None:
    done = cli("chat", stdin="Hello!\nHi\n")
    assert done.code == 0
    assert done.err == "(stopped)\n"
    first, second = done.out.splitlines()
    assert second == HELLO
    assert HELLO.startswith(first)
    assert interrupted[2][:2] == [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first},
    ]


def test_ctrl_c_ends_generate(cli: Cli, interrupted: list[Any]) -> None:
    interrupted.append("the first is not interrupted")
    done = cli("generate", "--chat", "Hello!")
    assert (done.code, done.err) == (130, "")
    assert HELLO.startswith(done.out.removesuffix("\n"))


def test_the_model_may_be_the_argument_and_flags_may_be_spelt_with_underscores(cli: Cli) -> None:
    assert cli("chat", "demo", stdin="Hello!").out.startswith(HELLO)
    both = cli("chat", "demo-draft", "--model", "nowhere/else", stdin="Hello!")
    assert "two models; give one" in both.err
    for words, ours in (
        ("--max_new_tokens 3", "--max-new-tokens"),
        ("--cache_implementation static", "--cache-implementation"),
        ("--offload_folder /x", "--offload-folder"),
    ):
        assert f"write {ours}\n" in cli("chat", *words.split()).err

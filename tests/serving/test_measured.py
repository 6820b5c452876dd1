"""`jackfield bench serve` and `jackfield chat --server` against a server of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.client.prompts import Beginnings

if TYPE_CHECKING:
    from command_line import Cli
    from served import Served


def test_a_server_of_ours_is_measured(cli: Cli, server: Served) -> None:
    flags = (
        "--endpoint completions --concurrency 2 --requests 4 --max-tokens 9 --warm-up 1 --seed 3"
    )
    (load,) = cli("bench", "serve", "--url", server.url, "--json", *flags.split()).json["loads"]
    prompts = [Beginnings(3)(number) for number in range(4)]
    right = server.engine.generate(prompts, max_new_tokens=9, do_sample=False)
    assert (load["requests"], load["failed"], load["counted"]) == (4, 0, True)
    assert load["tokens"] == sum(one.usage.completion_tokens for one in right)
    assert load["prompt_tokens"]["max"] == max(one.usage.prompt_tokens for one in right)


def test_prompts_have_about_as_many_tokens_as_asked(cli: Cli, server: Served) -> None:
    flags = "--prompt-tokens 120 --concurrency 2 --requests 6 --max-tokens 2 --warm-up 0 --json"
    (load,) = cli("bench", "serve", "--url", server.url, *flags.split()).json["loads"]
    assert load["failed"] == 0
    assert 100 <= load["prompt_tokens"]["p50"] <= 140


def test_chat_is_the_same_over_a_server(cli: Cli, server: Served) -> None:
    lines = "Hello!\nSort these numbers: 41 7 88 23\n"
    flags = ("--no-do-sample", "--max-new-tokens", "20")
    here = cli("chat", *flags, stdin=lines)
    there = cli("chat", "--server", server.url, *flags, stdin=lines)
    assert (there.code, there.out, there.err) == (here.code, here.out, here.err)
    long = cli("chat", "--server", server.url, stdin="one two three four " * 200 + "\nHello!\n")
    assert long.err.startswith("error: ")
    assert long.out == "Hello! How can I help you?\n"


def test_a_model_that_is_not_there_is_named_with_those_that_are(cli: Cli, server: Served) -> None:
    done = cli("chat", "nope", "--server", server.url, stdin="Hello!")
    done.assert_failed(2, "there is no model 'nope'")
    assert done.err.endswith("; there are demo\n")

"""What other servers take is taken, or answered with what there is here."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import typer
from test_bodies import CHAT, SAY, error_of

import jackfield
from jackfield import cli
from jackfield.cli.app import app
from jackfield.cli.server_flags import FLAGS
from jackfield.errors import PlanError
from jackfield.serving.errors import ApiError
from jackfield.serving.schema import theirs
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.completions import CompletionRequest
from jackfield.serving.schema.responses import ResponsesRequest
from jackfield.serving.settings import ServerSettings

if TYPE_CHECKING:
    from served import Served

typer_app: Any = typer.main.get_command(app)
OURS = {f for p in typer_app.commands["serve"].params for f in (*p.opts, *p.secondary_opts)}
ANSWERS = sorted(set(FLAGS.values()))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.one_in(4)
def test_a_flag_of_another_server_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert flag not in OURS
    assert cli.run(["serve", "demo", flag, "7"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: No such option: {flag}; {FLAGS[flag]}\n"


@pytest.mark.parametrize("written", ["--ctx-size=5", "--ctx_size 5", "-c 5", "-c5"])
def test_however_it_is_written(capsys: pytest.CaptureFixture[str], written: str) -> None:
    assert cli.run(["serve", "demo", *written.split()]) == 2
    assert "--max-completion-tokens" in capsys.readouterr().err


def test_settings_of_texts_are_fields(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--top-k", "--min-p", "--temperature", "--repetition-penalty"):
        assert cli.run(["serve", "demo", flag, "7"]) == 2
        assert "it is a field of each request" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_answered_is_there(answer: str) -> None:
    for flag in re.findall(r"(?<![\w-])--[a-z-]+", answer):
        assert flag in OURS, flag
    for setting in re.findall(r"(\w+) = ", answer):
        assert setting in ServerSettings.model_fields
    for kind, selection in re.findall(r"--(cache|decoding|attention) '?(\w+\?[^' ]+)", answer):
        chosen = {"cache": "cache_implementation"}.get(kind, kind)
        more: Any = {"assistant_model": "demo-draft"} if "assisted" in selection else {}
        with contextlib.suppress(PlanError):  # names and options are right; this model may not fit
            jackfield.plan("demo", **{chosen: selection.replace("=N", "=64")}, **more)


def test_other_commands_answer_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "--ctx-size", "5", "hi"]) == 2
    assert "there is none" not in capsys.readouterr().err


BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    "text": (CompletionRequest, {"model": "m", "prompt": "a"}),
    "responses": (ResponsesRequest, {"model": "m", "input": "a"}),
}
THEIRS = [*theirs._FIELDS, *theirs._SETTINGS]


@pytest.mark.parametrize("name", THEIRS)
def test_a_field_of_another_server_is_answered_by_name(name: str) -> None:
    answered = 0
    for kind, base in BODIES.values():
        if name in kind.model_fields:
            answered += 1
            continue
        kind.model_validate({**base, name: None})  # which asks for nothing
        if (answer := theirs.instead_of_field(name, kind.NAMES, kind.model_fields)) is None:
            continue  # a body that has no such thing by any name
        answered += 1
        with pytest.raises(ApiError) as caught:
            kind.model_validate({**base, name: 7})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert caught.value.message == f"nothing here reads the field {name!r}; {answer}"
        if written := re.match(r"write (\w+)[^=(]*$", answer):
            assert written[1] in kind.model_fields, (kind, answer)
    assert answered >= 2


def test_what_has_another_name_is_named(server: Served) -> None:
    for more, field in (
        ({"guided_json": {}}, "response_format"), ({"repeat_penalty": 1.1}, "repetition_penalty"),
        ({"n_predict": 5}, "max_completion_tokens"), ({"best_of": 2}, "n"),
        ({"ignore_eos": True}, "logit_bias"),
    ):  # fmt: skip
        answer = httpx.post(server.url + CHAT, json={**SAY, **more})
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == next(iter(more))
        assert re.search(rf"\b{field}\b", error["message"])
    assert httpx.post(server.url + CHAT, json={**SAY, "min_p": 0.1, "top_k": 5}).status_code == 200


@pytest.mark.parametrize("name", [name for name in theirs.NEUTRAL if name in {*THEIRS, "top_k"}])
def test_a_field_that_asks_for_what_is_so_is_taken(name: str) -> None:
    for value in theirs.NEUTRAL[name]:
        for kind, base in BODIES.values():
            if name in kind.model_fields and name != "top_k":
                continue
            plain, found = kind.model_validate(base), kind.model_validate({**base, name: value})
            assert found.model_dump() == plain.model_dump(), (name, value)
            assert found.model_fields_set == plain.model_fields_set


def test_a_neutral_number_counts_before_what_the_models_config_says() -> None:
    """With top_k = 1 of the model's own, all draws are the likeliest."""
    own = {"do_sample": True, "top_k": 1, "typical_p": 0.2, "repetition_penalty": 9.0}
    neutral_ones = {"top_k": -1, "typical_p": 1.0, "repeat_penalty": 1.0, "min_tokens": 0}
    asked = ChatRequest.model_validate({**SAY, **neutral_ones}).asked()
    assert asked | {"top_k": 0, "typical_p": 1.0, "repetition_penalty": 1.0} == asked
    prompt, new = "Once", {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    with jackfield.load("demo") as engine:
        free = engine.generate(prompt, **new)[0].token_ids
        engine.model.generation_config.update(**own)
        assert engine.generate(prompt, **new)[0].token_ids != free
        found = {name: asked[name] for name in ("top_k", "typical_p", "repetition_penalty")}
        assert engine.generate(prompt, **new, **found)[0].token_ids == free


@pytest.mark.parametrize("name", THEIRS)
def test_no_value_is_answered_with_the_opposite(name: str) -> None:
    """What is switched off, and is on here, is not "always so"; what is off here is taken."""
    for kind, _ in BODIES.values():
        if name in kind.model_fields:
            continue
        for value in (True, False):
            if not theirs.asks_for_nothing(name, value, kind.model_fields):
                said = theirs.instead_of_field(name, kind.NAMES, kind.model_fields, value)
                assert "always so" not in (said or "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"include_reasoning": False}, "as reasoning_content: leave it unread"),
        ({"separate_reasoning": False}, "thoughts always come apart"),
        ({"reasoning_format": "none"}, "thoughts always come apart"),
        ({"structured_outputs": {"regex": "a"}}, "write regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "write choices"),
        ({"structured_outputs": {"json": {}}}, "write response_format"),
        ({"ignore_eos": True}, "logit_bias"),
        ({"add_special_tokens": True}, "there is nothing like it"),
    ],
)
def test_fields_by_what_they_say(given: dict[str, Any], words: str) -> None:
    kind, base = BODIES["chat"]
    with pytest.raises(ApiError) as caught:
        kind.model_validate({**base, **given})
    assert words in caught.value.message


def test_what_clients_of_others_write_out_changes_nothing(server: Served) -> None:
    more = {
        "ignore_eos": False, "min_tokens": 0, "use_beam_search": False, "best_of": 1, "top_k": -1,
        "stop_token_ids": [], "skip_special_tokens": True, "priority": 0, "typical_p": 1.0,
        "repetition_penalty": 1.0, "spaces_between_special_tokens": True, "length_penalty": 1.0,
        "include_stop_str_in_output": False, "add_special_tokens": False, "mirostat": 0,
    }  # fmt: skip
    asked = {**SAY, "temperature": 0}
    plain, found = (httpx.post(server.url + CHAT, json=b) for b in (asked, {**asked, **more}))
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ("--slots", "there is none: GET /v1/report and /v1/plan say what runs"),
        ("--no-mmap", "there is none: weights are always mapped from their files"),
        ("--enforce-eager", "write --compile none"),
        ("--no-enforce-eager", "drop it: it is so anyway"),
        ("--no-cb-use-cuda-graph", "write --compile none"),
        ("--no-enable-cors", "drop it: no other site may ask without --cors-origin"),
        ("--no-trust-remote-code", "drop it: it is so anyway"),
        ("--kv-cache-dtype auto", "drop it: it is so anyway"),
        ("--tensor-parallel-size 1", "drop it: it is so anyway"),
        ("--tensor-parallel-size=2", "write --tp N"),
        ("--no-enable-prefix-caching", "write --cache 'paged?prefix_sharing=no' to turn it off"),
        ("--generation-config vllm", FLAGS["--generation-config"]),
        ("--no-compile", "write --compile none"),
        ("--no-truncate", "drop it: a prompt that is too long is refused, never cut"),
    ],
)
def test_what_a_flag_says_counts(capsys: pytest.CaptureFixture[str], words: str, due: str) -> None:
    assert cli.run(["serve", "demo", *words.split()]) == 2
    assert capsys.readouterr().err.partition("; ")[2] == f"{due}\n"


def test_no_flag_of_a_server_is_told_the_opposite() -> None:
    for flag in FLAGS:
        if flag.startswith("--no-"):
            assert (
                FLAGS.get(f"--{flag[5:]}") != FLAGS[flag]
                or "find_" in FLAGS[flag]
                or (flag in ("--no-jinja", "--no-enable-log-requests"))
            ), flag


@pytest.mark.parametrize("kind", BODIES)
def test_a_field_of_ours_that_is_empty_is_no_field_that_is_missing(kind: str) -> None:
    made, base = BODIES[kind]
    (prompt,) = {"prompt", "messages", "input"} & base.keys()
    for value in ("", []):
        if (prompt, value) in (("prompt", ""), ("input", "")):
            assert getattr(made.model_validate({**base, prompt: value}), prompt) == value
            continue
        with pytest.raises(Exception, match=r"(?s)" + prompt) as caught:
            made.model_validate({**base, prompt: value})
        assert "Field required" not in str(caught.value)
    for name in ("n", "max_tokens", "top_k", "response_format"):
        if name in made.model_fields:
            with pytest.raises(Exception, match=name):
                made.model_validate({**base, name: []})

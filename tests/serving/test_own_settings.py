"""What a model's own generation config says is met, or said when the server starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from test_bodies import CHAT, SAY

import jackfield
from jackfield import cli
from jackfield.demo import MODEL_PATH
from jackfield.requests.vocabulary import RETURNED

if TYPE_CHECKING:
    from served import Served


@pytest.fixture
def saying(tmp_path: Path) -> Callable[..., str]:
    """The demo model in a folder, with these fields in its generation_config.json."""

    def made(**fields: Any) -> str:
        folder = tmp_path / "model"
        shutil.copytree(MODEL_PATH, folder)
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        return str(folder)

    return made


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"num_beams": 4},
            (
                "its generation_config.json asks for num_beams=4, which the decoding 'sample' does "
                "not honour; serve it with --decoding beam, or take num_beams out of that file"
            ),
        ),
        (
            {"token_healing": True},
            (
                "its generation_config.json asks for token_healing=True, which the decoding "
                "'sample' does not honour; take token_healing out of that file"
            ),
        ),
        (
            {"repetition_penalty": -1.0},
            (
                "repetition_penalty must be more than 0, not -1.0, which the model's "
                "generation_config sets; change its generation_config.json"
            ),
        ),
    ],
)
def test_what_no_client_could_answer_is_said_at_the_start(
    capsys: pytest.CaptureFixture[str],
    saying: Callable[..., str],
    fields: dict[str, Any],
    words: str,
) -> None:
    assert cli.run(["serve", saying(**fields), "--port", "0"]) == 2
    assert capsys.readouterr().err == f"error: model: {words}\n"


def test_a_model_that_asks_for_beams_is_served_with_beams(
    serve: Callable[..., Served], saying: Callable[..., str]
) -> None:
    folder = saying(num_beams=3, length_penalty=2.0, early_stopping=True)
    server = serve(models={"demo": {"model": folder, "decoding": "beam"}})
    answer = httpx.post(server.url + CHAT, json=SAY)
    assert answer.status_code == 200, answer.text
    with jackfield.load(folder, decoding="beam") as engine:
        (due,) = engine.generate([{"role": "user", "content": "hi"}], max_new_tokens=2)
    assert answer.json()["choices"][0]["message"]["content"] == due.text


def test_what_a_call_returns_is_nothing_to_a_server(
    serve: Callable[..., Served], saying: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saying(**dict.fromkeys(RETURNED, True))
    server = serve(models={"demo": {"model": folder}})
    assert httpx.post(server.url + CHAT, json=SAY).status_code == 200
    for name in RETURNED:
        assert f"ignored {name}=True in the generation_config" in caplog.text
    with jackfield.load(folder) as engine:
        (one,) = engine.generate("Say", max_new_tokens=2)
        assert (one.logits, one.scores, one.attentions, one.hidden_states) == (None,) * 4
        (one,) = engine.generate("Say", max_new_tokens=2, output_scores=True)
        assert one.scores is not None


@pytest.mark.parametrize(("said", "word"), [("None", "null"), ("True", "true")])
def test_words_of_python_behind_set(
    capsys: pytest.CaptureFixture[str], said: str, word: str
) -> None:
    asked = ["generate", "hi", "--model", "demo", "--max-new-tokens", "2"]
    assert cli.run([*asked, "--set", f"use_cache={said}"]) == 2
    assert capsys.readouterr().err.endswith(f"JSON is read here; write --set use_cache={word}\n")
    assert cli.run([*asked, "--set", f"use_cache={word}"]) == 0

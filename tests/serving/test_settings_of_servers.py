"""Settings that nobody may overlook: whose models, whose key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import jackfield
from jackfield.errors import UsageError
from jackfield.serving.errors import ApiError
from jackfield.serving.keys import Keys
from jackfield.serving.pool import Pool
from jackfield.serving.settings import digest, settings

DEMO = {"demo": {"model": "demo"}}


def test_without_a_model_the_demo_is_served() -> None:
    assert [*settings(max_waiting=9).models] == ["demo"]


def test_models_come_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[models.small]\nmodel = "demo"\n')
    assert [*settings(file).models] == ["small"]
    with pytest.raises(UsageError, match=re.escape(str(file))):
        settings(file, models=DEMO)
    monkeypatch.setenv("JACKFIELD_MODELS", '{"a": {"model": "demo"}}')
    with pytest.raises(UsageError, match="JACKFIELD_MODELS"):
        settings(models=DEMO)
    assert [*settings().models] == ["a"]


def test_the_key_of_the_environment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKFIELD_API_KEY", "secret")
    assert settings().keys["default"].sha256 == digest("secret")
    assert settings(host="0.0.0.0").keys


@pytest.mark.parametrize("key", ["", " ", "\n", "two words", "ends ", "schl\u00fcssel"])
def test_a_key_that_nobody_can_send_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("JACKFIELD_API_KEY", key)
    with pytest.raises(UsageError, match="JACKFIELD_API_KEY") as caught:
        settings()
    assert key.strip() == "" or key not in str(caught.value)


@pytest.mark.parametrize("key", ["jf-a_b", "!~", "a=b/c+d"])
def test_a_key_that_is_taken_opens(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("JACKFIELD_API_KEY", key)
    assert Keys(settings().keys).owner(f"Bearer {key}") == "default"


def test_keys_come_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'[keys.team]\nsha256 = "{digest("a")}"\n')
    assert [*settings(file).keys] == ["team"]
    monkeypatch.setenv("JACKFIELD_API_KEY", "secret")
    with pytest.raises(UsageError, match=re.escape(str(file))):
        settings(file)
    monkeypatch.setenv("JACKFIELD_KEYS__MORE__SHA256", digest("b"))
    with pytest.raises(UsageError, match="JACKFIELD_KEYS__MORE__SHA256"):
        settings()


def test_a_part_of_the_models_in_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACKFIELD_MODELS__a__model", "demo")
    with pytest.raises(UsageError, match="JACKFIELD_MODELS__a__model"):
        settings(models=DEMO)


@pytest.mark.parametrize("name", ["JACKFIELD_FOO", "JACKFIELD_MODEL", "JACKFIELD_PORTS__A"])
def test_a_variable_that_is_no_setting_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=name):
        settings()


def test_a_model_is_also_called_what_it_was_loaded_from() -> None:
    pool = Pool(settings(models={"small": {"model": "demo"}}), jackfield.load)
    assert pool["demo"] is pool["small"]
    with pytest.raises(ApiError, match="there are small"):
        pool["other"]

"""docs/serving.md and docs/deploy say what is so."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fastapi.routing import APIRoute

from jackfield.serving.app import create_app
from jackfield.serving.schema.chat import ChatRequest
from jackfield.serving.schema.completions import CompletionRequest
from jackfield.serving.settings import ServerSettings, settings

if TYPE_CHECKING:
    from served import Served

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text()
DEPLOY = ROOT / "docs/deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[tuple[list[str], list[str]]]:
    """What stands between backticks in the first column, and in the others."""
    cells = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall("`(.*?)`", first), rest) for first, *rest in cells]


def test_every_setting_is_told_with_what_it_is_by_itself() -> None:
    told = {name: rest[0] for names, rest in rows(section("Options")) for name in names}
    assert set(told) == set(ServerSettings.model_fields)
    for names, (default, _) in rows(section("Options")):
        given = re.findall("`(.*?)`", default)
        fields = [ServerSettings.model_fields[name] for name in names]
        own = [field.get_default(call_default_factory=True) for field in fields]
        if given:  # an address is the one value that JSON has no form for
            assert [json.loads(f'"{v}"' if v.count(".") > 1 else v) for v in given] == own
        else:
            assert not any(own)


def test_every_field_of_a_body_is_told() -> None:
    told = [name for names, _ in rows(section("Fields of a request")) for name in names]
    assert sorted(told) == sorted(ChatRequest.model_fields)
    beside = set(CompletionRequest.model_fields) - set(ChatRequest.model_fields)
    assert {name for name in beside if f"`{name}`" not in section("Fields of a request")} == set()


def test_every_endpoint_and_metric_is_told() -> None:
    app = create_app(settings())
    there = {
        f"{method} {route.path.replace(':path', '')}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    told = {name for names, _ in rows(section("Endpoints")) for name in names}
    assert told == there | {"GET /", "GET /openapi.json"}
    metrics = {
        found.name.removeprefix("jackfield_") + ("_total" if found.type == "counter" else "")
        for found in app.state.metrics.registry.collect()
    }
    assert {name for names, _ in rows(section("Metrics")) for name in names} == metrics


def test_the_first_client_is_answered(server: Served) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url), names)  # noqa: S102 - our own page
    assert names["answer"].choices[0].message.content  # type: ignore[attr-defined]
    names["client"].close()  # type: ignore[attr-defined]


def test_the_file_of_settings_is_read() -> None:
    found = settings(DEPLOY / "server.toml")
    assert list(found.models) == ["demo", "qwen"]
    assert found.keys["team"].requests_per_minute == 120


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "jackfield.service").read_text()
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    command = unit["Service"]["ExecStart"].split()
    assert command[1:3] == ["serve", "--config"]
    drain = ServerSettings.model_fields["drain"].default
    assert float(unit["Service"]["TimeoutStopSec"]) > drain
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("there is no systemd-analyze")
    file = tmp_path / "jackfield.service"
    file.write_text(text.replace(command[0], sys.executable))
    done = subprocess.run([verify, "verify", "--man=no", str(file)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if file.name in line]
    assert said == []


INSTRUCTIONS = {
    "FROM", "RUN", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip


def test_the_container_file_is_made_of_instructions() -> None:
    lines = [line for line in CONTAINERFILE.splitlines() if line and line[0] != "#"]
    assert {line.split()[0] for line in lines} == INSTRUCTIONS
    commands = {
        line.split()[0]: json.loads(line.partition(" ")[2])
        for line in lines
        if line.startswith(("ENTRYPOINT", "CMD"))
    }
    assert commands["ENTRYPOINT"] == ["jackfield", "serve"]
    assert commands["CMD"][0] == "--config"


def test_the_health_check_of_the_container_tells(serve: Callable[..., Served]) -> None:
    (check,) = re.findall(r"HEALTHCHECK .*? CMD (\[.*\])", CONTAINERFILE)
    _, flag, code = json.loads(check)
    server = serve(preload=False)

    def healthy() -> bool:
        own = code.replace("http://127.0.0.1:8000", server.url)
        return (
            subprocess.run([sys.executable, flag, own], stderr=subprocess.DEVNULL).returncode == 0
        )

    assert healthy()
    (served,) = server.pool.models.values()
    served.state = "failed"
    assert not healthy()


def test_the_pictures_are_small() -> None:
    pictures = [ROOT / "docs" / name for name in re.findall(r"\((images/.*?\.png)\)", PAGE)]
    assert len(pictures) == 2
    assert all(picture.stat().st_size < 150_000 for picture in pictures)

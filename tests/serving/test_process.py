"""Servers that are processes: signals, exit codes; what a command line or a file says wrong."""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from jackfield import cli
from jackfield.serving import running
from jackfield.serving.keys import Keys, digest
from jackfield.serving.settings import ServerSettings, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOW = {"model": "demo", "prompt": "Tell me", "max_tokens": 400, "stream": True,
        "logit_bias": {"0": -100, "1": -100}}  # fmt: skip


class Process:
    """`jackfield serve demo`; `lines` are those of its standard error so far."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "jackfield", "serve", "demo", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"at (http://127\.0\.0\.1:(\d+)) ", line):
                self.url, self.port = found[1], found[2]
                return
        raise AssertionError(self.lines)

    def ended(self) -> int:
        """Its exit code, soon."""
        return self.process.wait(20)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Process]:
    made = Process(*arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@contextlib.contextmanager
def streaming(url: str) -> Iterator[Iterator[str]]:
    with httpx.stream("POST", f"{url}/v1/completions", json=SLOW, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_drains(number: signal.Signals) -> None:
    with started("--port", "0") as server, streaming(server.url) as lines:
        server.process.send_signal(number)
        deadline = time.monotonic() + 5
        # uvicorn closes what was connected just then and has sent nothing that it has read
        with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):
            while httpx.get(f"{server.url}/health/ready"):
                assert time.monotonic() < deadline
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health/ready")
        assert server.process.poll() is None
        *_, last, _, done, _ = lines
        assert '"finish_reason":"length"' in last
        assert done == "data: [DONE]"
        assert server.ended() == 0


@pytest.mark.long
def test_a_second_signal_stops_at_once_and_a_dead_server_leaves_its_port() -> None:
    with started("--port", "0") as server, streaming(server.url) as lines:
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    with started("--port", server.port) as again:
        with streaming(again.url) as lines:
            again.process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert again.ended() == -signal.SIGKILL
    with started("--port", server.port) as third:
        assert httpx.get(f"{third.url}/health/ready").status_code == 200


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line."""
    code = cli.run(["serve", *arguments])
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return code, said


def pair(folder: Path, name: str) -> tuple[str, str]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "port"), (["--host", "0.0.0.0"], "no API key"),
        (["--host", " "], "host"), (["--model-timeout", "-1"], "model_timeout"),
        (["--host", "no.such.invalid", "--allow-unauthenticated"], "cannot serve at"),
        (["--host", "a..b", "--allow-unauthenticated"], "cannot serve at"),
        (["--host", "x" * 300, "--allow-unauthenticated"], "cannot serve at"),
        (["--ssl-certfile", "/nope"], "give both"),
        (["--ssl-certfile", "/nope", "--ssl-keyfile", "/nope"], "are no good"),
        (["--config", "/nope.toml"], "cannot read /nope.toml"),
        (["--chat-template-kwargs", "{"], "is not JSON"), (["--reasoning", "much"], "reasoning"),
        (["--max-waiting", "0"], "max_waiting"), (["--cors-origin", "x", "--port", "-1"], "port"),
        *(([flag, "1"], "; ") for flag in (
            "--trust-remote-code", "--cb-block-size", "--cb-num-blocks", "--cb-max-batch-tokens",
            "--cb-max-memory-percent", "--cb-use-cuda-graph", "--enable-cors", "--log-level",
            "--non-blocking", "--force-model", "--decision-config",
        )),
    ],
)  # fmt: skip
def test_what_is_wrong_on_the_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, line = failed(capsys, "demo", *arguments)
    assert code == 2
    assert said in line


def test_every_flag_of_transformers_serve_is_taken_or_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve = pytest.importorskip("transformers.cli.serve", reason="this transformers has none")
    names = [*inspect.signature(serve.Serve.__init__).parameters][1:]
    assert len(names) > 15
    for name in names:
        code = cli.run(["serve", "demo", f"--{name.replace('_', '-')}", "--help"])
        told = capsys.readouterr()
        assert code in (0, 2)
        assert "No such option" not in told.err or "; " in told.err, told.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = ", "is not TOML"), ("\xff", "is not TOML"), ("prot = 1", "prot: is no setting"),
        ("port = 'x'", "port: "), ("[keys.a]\nsha256 = 'short'", "keys.a.sha256: "),
        ("[keys.a]\nkey = 'x'", "keys.a.key: is no setting"), ("[models.a]", "models.a.model: "),
        ("[models.a]\nmodel = 'demo'\ncach = 'x'", "models.a: 'cach' is no argument"),
        ("[models.'a b']\nmodel = 'demo'", "models.a b"), ("max_body = 0", "max_body: "),
        ("receive_timeout = inf", "receive_timeout: "), ("keys = 3", "keys: "),
        ("a = " + "[" * 5000, "is not TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "serve.toml"
    file.write_bytes(text.encode("latin-1"))
    code, line = failed(capsys, "--config", str(file))
    assert code == 2
    assert said in line
    assert str(file) in line


def test_flags_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("port = 1\nmax_waiting = 1\ndeadline = 1.0\n[models.demo]\nmodel = 'demo'")
    monkeypatch.setenv("JACKFIELD_PORT", "2")
    monkeypatch.setenv("JACKFIELD_MAX_WAITING", "2")
    found: list[ServerSettings] = []
    monkeypatch.setattr(running, "serve", lambda given, say: found.append(given))
    assert cli.run(["serve", "--config", str(file), "--port", "3"]) == 0
    assert (found[0].port, found[0].max_waiting, found[0].deadline) == (3, 2, 1.0)
    for name, value, said in (("PORT", "x", "port"), ("KEYS", "{", "environment")):
        with monkeypatch.context() as patch:
            patch.setenv(f"JACKFIELD_{name}", value)
            code, line = failed(capsys, "demo")
            assert code == 2
            assert said in line


def test_a_port_in_use_and_certificates_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, line = failed(capsys, "demo", "--port", port)
        assert code == 2
        assert port in line
    (cert, _), (_, key) = pair(tmp_path, "one"), pair(tmp_path, "two")
    code, line = failed(capsys, "demo", "--ssl-certfile", cert, "--ssl-keyfile", key)
    assert code == 2
    assert "are no good" in line


def test_a_key_with_a_passphrase_asks_nobody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cert, key = pair(tmp_path, "one")
    locked = str(tmp_path / "locked.key")
    lock = ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:words", "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    code, line = failed(capsys, "demo", "--ssl-certfile", cert, "--ssl-keyfile", locked)
    assert code == 2
    assert "are no good" in line


@pytest.mark.parametrize("name", ["ann", "team one", 'a"b.c', "grün"])
def test_a_new_key_fits_what_is_written_into_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    if " " in name:
        assert cli.run(["serve", "--new-key", name]) == 2
        return
    assert cli.run(["serve", "--new-key", name]) == 0
    told = capsys.readouterr()
    key = told.out.strip()
    assert key not in told.err
    file = tmp_path / "serve.toml"
    file.write_text(told.err.partition("\n")[2])
    found: Any = settings(file)
    assert found.keys[name].sha256 == digest(key)
    assert Keys(found.keys).owner(f"Bearer {key}") == name

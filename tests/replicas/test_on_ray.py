"""Replicas on Ray: what a command line says wrong, and clusters of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from clusters import Command, imports_ray, linux, on_ray, ranks, replicas, served
from clusters import cluster as running_cluster

import jackfield
from jackfield import cli
from jackfield.bridge.source import packaged
from jackfield.errors import UsageError
from jackfield.parallel.world import World, world_of
from jackfield.replicas import cluster
from jackfield.replicas.cluster import Count
from jackfield.replicas.room import Place

TELL = {"model": "demo", "prompt": "Tell me", "max_tokens": 200, "temperature": 0,
        "logit_bias": {"0": -100, "1": -100}}  # fmt: skip


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a mistake."""
    assert cli.run(["serve", "demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("count", ["0", "-1", "x", "2:1", "0:3", "1:2:3", "", ":", "1.5"])
def test_a_number_of_replicas_that_cannot_be(
    capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert "--replicas" in failed(capsys, f"--replicas={count}")


def test_numbers_of_replicas() -> None:
    assert (Count.of("3"), Count.of("1:4")) == (Count(3, 3), Count(1, 4))


def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--replicas N" in failed(capsys, "--ray-address", "127.0.0.1:1")


def test_a_port_in_use_is_told_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert port in failed(capsys, "--replicas", "2", "--port", port)


@pytest.mark.parametrize("library", ["ray", "grpc"])
def test_without_ray_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert "pip install jackfield[ray]" in failed(capsys, "--replicas", "2", "--port", "0")


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:1", "127.0.0.1:", "a b"])
def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str], address: str) -> None:
    said = failed(capsys, "--replicas", "1", "--port", "0", "--ray-address", address)
    assert "HOST:PORT" in said


@on_ray
@imports_ray
def test_an_address_where_no_cluster_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REACHED_WITHIN", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = failed(capsys, "--replicas", "1", "--port", "0", "--ray-address", address)
        assert f"{address}: no cluster of Ray answers" in said
    said = failed(capsys, "--replicas", "1", "--port", "0", "--ray-address", address)
    assert "no cluster of Ray answers" in said


@on_ray
@imports_ray
def test_what_is_asked_for_and_what_is_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    machine = {"CPU": 3.0, "GPU": 1.0}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": machine}] * 2)
    free = {"CPU": 5.0, "GPU": 1.0}
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    Place(1, 2.0, 0.0).check(2, replaces=False)  # 2 + 2 of 3 + 3
    with pytest.raises(UsageError, match=r"3 replicas .* 2 CPU; the cluster has 6 CPU, .* 5 CPU"):
        Place(1, 2.0, 0.0).check(3, replaces=False)
    both = Place(1, 1.0, 1.0)
    both.check(2, replaces=True)  # those that run make room
    with pytest.raises(UsageError, match=r"1 CPU and 1 GPU; .* 5 CPU and 1 GPU free"):
        both.check(2, replaces=False)
    Place(3, 1.0, 0.0).check(1, replaces=False)  # 3 of 5
    with pytest.raises(UsageError, match=r"2 replicas have no place: each asks for 3 times 1 CPU;"):
        Place(3, 1.0, 0.0).check(2, replaces=False)


@on_ray
@imports_ray
def test_the_share_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    assert Place.of(1, 2, own=True) == Place(1, 4.0, 0.0)
    assert Place.of(3, 2, own=True) == Place(3, 1.3333, 0.0)
    assert Place.of(2, 9, own=True) == Place(2, 0.5, 0.0)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 8.0})
    assert Place.of(4, 2, own=False) == Place(4, 1.0, 1.0)


@on_ray
@imports_ray
def test_what_each_rank_is_told() -> None:
    from jackfield.replicas.rank_group import environments

    told = environments(["a", "b", "a"], "10.0.0.1", 4000, gpus=False)
    assert [world_of(each) for each in told] == [
        World(0, 3, 0, 2, "10.0.0.1", 4000),
        World(1, 3, 0, 1, "10.0.0.1", 4000),
        World(2, 3, 1, 2, "10.0.0.1", 4000),
    ]
    with_gpus = environments(["a", "a"], "10.0.0.1", 4000, gpus=True)
    assert {world_of(each).local_rank for each in with_gpus} == {0}  # type: ignore[union-attr]


async def streams(url: str, count: int, **more: Any) -> Counter[str]:
    """How so many streams end: whole, or by which error, before or after it has begun."""
    ends: Counter[str] = Counter()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> None:
            begun = "not begun"
            try:
                asked = {**TELL, "prompt": f"{number}. Tell me", **more}
                async for chunk in await client.completions.create(**asked, stream=True):
                    begun = "whole" if chunk.choices[0].finish_reason else "begun"
                ends[begun] += 1
            except openai.APIError as error:
                ends[f"{begun}: {error.message}"] += 1

        async with asyncio.timeout(240):
            await asyncio.gather(*(one(number) for number in range(count)))
    return ends


LOST = "begun: the replica that made this answer was lost before its end"


async def losing_one(
    url: str, count: int, after: float, of: Callable[[], list[int]] = replicas, **more: Any
) -> Counter[str]:
    """The same while a replica is killed; those that were lost, without the cause."""

    async def kill() -> None:
        await asyncio.sleep(after)
        os.kill(of()[0], signal.SIGKILL)

    ends, _ = await asyncio.gather(streams(url, count, **more), kill())
    found: Counter[str] = Counter()
    for end, many in ends.items():
        found[end.partition(" (")[0]] += many
    return found


@on_ray
@linux
@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_replica_is_lost_and_the_server_goes_on() -> None:
    with served("--replicas", "2", "--port", "0", "--max-batch-size", "4") as command:
        assert len(replicas()) == 2
        ends = asyncio.run(losing_one(command.url, 24, 0.5, max_tokens=60))
        assert sum(ends.values()) == 24
        assert ends.keys() <= {"whole", LOST}, ends
        assert ends["whole"] >= 12
        assert asyncio.run(streams(command.url, 4, max_tokens=4)) == {"whole": 4}


@pytest.fixture(scope="module")
def shareable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that two processes can share, with the demo model's tokenizer."""
    folder, demo = tmp_path_factory.mktemp("models") / "shareable", Path(packaged("demo"))
    words = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.35,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder)
    return folder


async def until(number: int, of: Callable[[], list[int]]) -> None:
    """Wait for so many processes."""
    async with asyncio.timeout(120):
        while len(of()) != number:
            await asyncio.sleep(0.2)


@pytest.mark.long
@on_ray
@linux
@pytest.mark.timeout(900)
def test_a_rank_is_lost_and_its_replica_with_it(shareable: Path) -> None:
    """One replica of two processes: what it said has the cause, and another takes its place."""
    alike = {"model": "shareable", "max_tokens": 12}
    with jackfield.load(shareable) as engine:
        expected = engine.generate("0. Tell me", max_new_tokens=12)[0].text
    with served("--replicas", "1", "--tp", "2", "--port", "0", model=str(shareable)) as command:
        assert (len(replicas()), len(ranks())) == (1, 1)
        before = replicas() + ranks()

        def text() -> str:
            body = {**TELL, **alike, "prompt": "0. Tell me", "logit_bias": None}
            for _ in range(10):  # while no replica is there, 503 comes after 30 s
                answer = httpx.post(f"{command.url}/v1/completions", json=body, timeout=120)
                if answer.status_code != 503:
                    break
                assert answer.json()["error"]["code"] == "unavailable"
            return str(answer.json()["choices"][0]["text"])

        assert text() == expected
        os.kill(ranks()[0], signal.SIGKILL)  # while nobody asks
        assert text() == expected  # by another replica, once it is there
        assert not {*before} & {*replicas(), *ranks()}


@pytest.mark.long
@on_ray
@linux
@pytest.mark.timeout(900)
def test_ranks_and_replicas_are_lost_under_load(shareable: Path) -> None:
    """Two replicas of two processes each: of one a rank is killed, then of one rank 0."""
    many = {"model": "shareable", "max_tokens": 400}
    with served("--replicas", "2", "--tp", "2", "--port", "0", model=str(shareable)) as command:
        for of in (ranks, replicas):
            assert (len(replicas()), len(ranks())) == (2, 2)
            before = {*replicas(), *ranks()}
            ends = asyncio.run(losing_one(command.url, 60, 1.0, of, **many))
            assert sum(ends.values()) == 60
            assert ends.keys() <= {"whole", LOST}, ends
            assert ends[LOST]
            assert ends["whole"] >= 20
            asyncio.run(until(2, replicas))
            asyncio.run(until(2, ranks))
            assert len(before & {*replicas(), *ranks()}) == 2  # the other replica's
            assert asyncio.run(streams(command.url, 20, **many)) == {"whole": 20}


@pytest.fixture
def head() -> Iterator[str]:
    with running_cluster() as address:
        yield address


@pytest.mark.long
@on_ray
@linux
@pytest.mark.timeout(900)
def test_on_a_cluster_that_runs(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is killed under load; then all are replaced under load, and no request fails."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    on = ["--ray-address", head]
    many = Command.__new__(Command)
    with pytest.raises(AssertionError, match="3 replicas have no place: each asks for 1 CPU"):
        many.__init__("--replicas", "3", "--port", "0", *on)  # type: ignore[misc]
    with served("--replicas", "2", "--port", "0", *on) as command:
        ends = asyncio.run(losing_one(command.url, 100, 1.0, max_tokens=100))
        assert ends["whole"] + ends[LOST] == 100, ends
        assert ends["whole"] >= 30
        assert asyncio.run(streams(command.url, 100, max_tokens=20)) == {"whole": 100}
        before = set(replicas())
        again = ["serve", "demo", "--replicas", "2", "--port", command.port, *on]
        asked, failures = _while_asking(command.url, [sys.executable, "-m", "jackfield", *again])
        assert asked > 20
        assert not failures
        assert not before & set(replicas())
        wrong = subprocess.run(
            [sys.executable, "-m", "jackfield", *again, "--allow-unauthenticated",
             "--cors-origin", "http://site"], capture_output=True, text=True,
        )  # fmt: skip
        assert wrong.returncode == 2
        assert "end it and start it anew" in wrong.stderr


def _while_asking(url: str, command: list[str]) -> tuple[int, list[str]]:
    """How many requests were asked while a command ran, and what was wrong with which."""
    done, asked, failures = threading.Event(), 0, list[str]()

    def ask() -> None:
        nonlocal asked
        with httpx.Client(timeout=120) as client:
            while not done.is_set():
                asked += 1
                body = {**TELL, "prompt": f"{asked}. Tell me", "max_tokens": 20}
                answer = client.post(f"{url}/v1/completions", json=body)
                if not answer.is_success:
                    failures.append(answer.text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert ran.returncode == 0, ran.stderr
    assert "replaced: 2 replicas" in ran.stderr
    return asked, failures

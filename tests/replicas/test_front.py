"""What stands in front of replicas: one server's behaviour, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from typing import Any

import httpx
import openai
import pytest
from fronted import Fleet, fleet, talking
from prometheus_client.parser import text_string_to_metric_families

import jackfield
from jackfield.errors import ExecutionError
from jackfield.replicas import front
from jackfield.replicas.calls import Call
from jackfield.replicas.replica import Replica, check_versions, versions
from jackfield.serving.keys import digest
from jackfield.serving.settings import given_settings

BODY = {"model": "demo", "prompt": "Tell me", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 12}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(act, 120))


def body_of(path: str, **more: Any) -> dict[str, Any]:
    said = {"prompt": "Tell me"}
    if path == "/v1/chat/completions":
        said = {"messages": CHAT["messages"]}
    if path == "/v1/responses":
        return {"model": "demo", "input": "Tell me", "max_output_tokens": 12, **more}
    return {"model": "demo", "max_tokens": 12, **said, **more}


def test_answers_are_those_of_one_server() -> None:
    async def act() -> None:
        with jackfield.load("demo") as engine:
            expected = engine.generate("Tell me", max_new_tokens=12)[0].text
        async with fleet() as (found, client):
            for _ in range(3):
                answer = await client.post("/v1/completions", json=BODY)
                assert answer.json()["choices"][0]["text"] == expected
                assert answer.headers["x-jackfield-replica"] in found.replicas
                assert answer.headers.get_list("x-request-id") == [answer.json()["id"][5:]]
            streamed = await talking(client).completions.create(**BODY, stream=True)
            assert "".join([c.choices[0].text async for c in streamed]) == expected
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "demo"
            assert (await client.get("/health/ready")).json() == {"status": "ready"}
            assert (await client.get("/health/live")).json() == {"status": "alive"}
            assert "<html" in (await client.get("/")).text
            for path, status in (("/nowhere", 404), ("/v1/completions", 405)):
                assert (await client.get(path)).status_code == status
            wrong = await client.post("/v1/completions", json={**BODY, "n_ew": 1})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "n_ew"
            assert found.requests.loads(found.replicas) == {"r0": 0, "r1": 0}
            assert {name for name, _ in found.asked} == {"r0", "r1"}

    run(act())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.one_in(4)
def test_a_request_that_had_not_begun_is_asked_of_another(path: str, stream: bool) -> None:
    async def act() -> None:
        async with fleet() as (found, client):
            for lost_after in (0, 1):  # before it is taken, and once it is
                found.losing = [lost_after]
                before = len(found.asked)
                answer = await client.post(path, json=body_of(path, stream=stream))
                assert answer.status_code == 200
                assert '"error"' not in answer.text.replace('"error":null', "")
                names = [name for name, _ in found.asked[before:]]
                assert len(set(names)) == 2 == len(names)
                lost = Replica(given_settings(), versions(), names[0])
                await lost.open()
                found.replicas[names[0]] = lost  # another in its place
            for replica in found.replicas.values():
                await replica.close()

    run(act())


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_has_begun_ends_with_an_error(path: str) -> None:
    async def act() -> None:
        async with fleet() as (found, client):
            found.losing = [3]
            answer = await client.post(path, json=body_of(path, stream=True))
            assert answer.status_code == 200
            events = answer.text.strip().split("\n\n")
            if path == "/v1/responses":
                *before, last = [json.loads(e.partition("\ndata: ")[2]) for e in events]
                assert events[-1].startswith("event: error\n")
                assert (last["type"], last["code"]) == ("error", "lost")
                assert [e["sequence_number"] for e in (*before, last)] == [*range(len(events))]
            else:
                assert events[-1] == "data: [DONE]"
                error = json.loads(events[-2][6:])["error"]
                assert error["code"] == "lost"
                assert error["type"] == "server_error"
            assert len(found.asked) == 1
            assert found.requests.loads(["r0", "r1"]) == {"r0": 0, "r1": 0}

    run(act())


def test_a_replica_whose_engine_is_lost_is_lost_with_the_cause() -> None:
    """What has begun ends so, what is asked of it then goes to another."""

    async def act() -> None:
        async with fleet(2, choose=lambda call, loads: min(loads)) as (found, client):
            (served,) = found.replicas["r0"].pool.models.values()
            engine = served.engine
            assert engine is not None
            body = {**BODY, "stream": True, "max_tokens": 500, "logit_bias": {"0": -100}}
            many = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)
            ]
            while engine.statistics().tokens_computed < 60:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.close)
            for answer in await asyncio.gather(*many):
                *_, error, done = answer.text.strip().split("\n\n")
                assert done == "data: [DONE]"
                assert json.loads(error[6:])["error"]["code"] == "lost"
                assert "lost before its end (demo: " in error
            assert found.replicas["r0"].lost
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.headers["x-jackfield-replica"] == "r1"
            assert [name for name, _ in found.asked[-2:]] == ["r0", "r1"]

    run(act())


def test_the_openai_client_hears_of_it() -> None:
    async def act() -> None:
        async with fleet(3) as (found, client):
            ours = talking(client)
            found.losing = [3]
            streamed = await ours.chat.completions.create(**CHAT, stream=True)
            with pytest.raises(openai.APIError, match="lost before its end"):
                [chunk async for chunk in streamed]
            found.losing = [3]
            events = await ours.responses.create(model="demo", input="Tell me", stream=True)
            *_, last = [event async for event in events]
            assert last.type == "error"
            assert "lost before its end" in last.message

    run(act())


def test_a_request_that_ends_replicas_does_not_end_all_of_them() -> None:
    async def act() -> None:
        async with fleet(4) as (found, client):
            found.losing = [1, 1, 1, 1]
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert "2 replicas were lost" in answer.json()["error"]["message"]
            assert len(found.replicas) == 2

    run(act())


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody(Fleet):
        async def ask(self, call: Call) -> Any:
            await asyncio.sleep(1000)
            yield

    async def act() -> None:
        monkeypatch.setattr(front, "TAKEN_WITHIN", 0.2)
        monkeypatch.setattr(front, "READY_WITHIN", 0.1)
        app = front.create_front(given_settings(), Nobody({}), front.Metrics())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for ask in (client.post("/v1/completions", json=BODY), client.get("/health/ready")):
                answer = await ask
                assert answer.status_code == 503
                assert "no replica took" in answer.json()["error"]["message"]

    run(act())


def test_a_client_that_leaves_ends_its_text() -> None:
    async def act() -> None:
        async with fleet(1) as (found, client):
            app: Any = client._transport.app  # type: ignore[attr-defined]
            left = asyncio.Event()
            body = json.dumps({**BODY, "max_tokens": 400, "stream": True, "logit_bias":
                               {"0": -100, "1": -100}}).encode()  # fmt: skip
            sent: list[Any] = [{"type": "http.request", "body": body}]

            async def receive() -> Any:
                if sent:
                    return sent.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message.get("body"):
                    left.set()

            headers = [(b"content-type", b"application/json"), (b"host", b"localhost"),
                       (b"content-length", str(len(body)).encode())]  # fmt: skip
            scope = {"type": "http", "method": "POST", "path": "/v1/completions",
                     "query_string": b"", "raw_path": b"/v1/completions", "root_path": "",
                     "scheme": "http", "http_version": "1.1", "headers": headers}  # fmt: skip
            await app(scope, receive, send)
            (served,) = found.replicas["r0"].pool.models.values()
            assert served.engine is not None
            assert served.in_use == 0
            assert served.engine.statistics().tokens_computed < 200
            assert found.closed == 1

    run(act())


def test_a_stored_response_is_looked_for_where_it_is() -> None:
    async def act() -> None:
        async with fleet(3) as (found, client):
            ours = talking(client)
            for _ in range(4):
                first = await ours.responses.create(model="demo", input="Hello", store=True)
                who = found.asked[-1][0]
                again = await ours.responses.retrieve(first.id)
                assert again.output_text == first.output_text
                second = await ours.responses.create(
                    model="demo", input="And?", previous_response_id=first.id
                )
                item = {"type": "item_reference", "id": first.output[0].id}
                await ours.responses.create(model="demo", input=[item, {"role": "user",
                                            "content": "So?"}])  # type: ignore[list-item]  # fmt: skip
                await ours.responses.delete(first.id)
                assert {name for name, _ in found.asked[-4:]} == {who}
                assert second.previous_response_id == first.id
            del found.replicas[who]
            with pytest.raises(openai.NotFoundError):
                await ours.responses.retrieve(second.id)

    run(act())


def test_keys_and_rates_are_counted_once_for_all_replicas() -> None:
    async def act() -> None:
        keys = {"ann": {"sha256": digest("jf-ann"), "requests_per_minute": 4},
                "bob": {"sha256": digest("jf-bob")}}  # fmt: skip
        async with fleet(keys=keys) as (found, client):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 401
            assert not found.asked
            ann = {"Authorization": "Bearer jf-ann"}
            statuses = [(await client.post("/v1/completions", json=BODY, headers=ann)).status_code
                        for _ in range(6)]  # fmt: skip
            assert statuses == [200] * 4 + [429] * 2
            bob = {"Authorization": "Bearer jf-bob"}
            for _ in range(6):
                assert (await client.post("/v1/completions", json=BODY, headers=bob)).is_success
            assert (await client.get("/metrics")).status_code == 401

    run(act())


def test_metrics_count_each_request_once_and_the_rest_by_replica() -> None:
    async def act() -> None:
        async with fleet() as (_, client):
            for _ in range(3):
                await client.post("/v1/completions", json=BODY)
            text = (await client.get("/metrics")).text
            families = {f.name: f.samples for f in text_string_to_metric_families(text)}
            asked = [s for s in families["jackfield_requests"] if s.name.endswith("_total")]
            posted = [s.value for s in asked if s.labels["endpoint"] == "/v1/completions"]
            assert posted == [3]
            made = [s for s in families["jackfield_generated_tokens"] if s.name.endswith("_total")]
            assert sum(s.value for s in made) == 36
            assert {s.labels["replica"] for s in made} == {"r0", "r1"}
            assert {s.labels["replica"] for s in families["jackfield_steps"]} == {"r0", "r1"}

    run(act())


def test_sites_that_may_ask_are_told_so_once() -> None:
    async def act() -> None:
        async with fleet(1, cors_origins=["http://site"]) as (_, client):
            answer = await client.get("/v1/models", headers={"Origin": "http://site"})
            assert answer.headers.get_list("access-control-allow-origin") == ["http://site"]

    run(act())


def test_requests_with_a_shared_beginning_land_together() -> None:
    async def hit_rate(choose: Any) -> float:
        # the cache of a replica holds some of the stories, not all
        arguments = {"cache_implementation": "paged?num_tokens=1536"}
        async with fleet(2, lambda m, **a: jackfield.load(m, **{**a, **arguments}),
                         choose) as (found, client):  # fmt: skip
            draw = random.Random(1)
            stories = [f"{n}. " + "Once upon a time there was a dog. " * 24 for n in range(8)]
            for story in draw.choices(stories, k=48):
                prompt = f"{story}{draw.randrange(100)}"
                await client.post(
                    "/v1/completions", json={**BODY, "prompt": prompt, "max_tokens": 2}
                )
            seen = [served.engine.statistics() for replica in found.replicas.values()
                    for served in replica.pool.models.values() if served.engine]  # fmt: skip
            computed = sum(s.tokens_computed for s in seen)
            return 1 - computed / sum(s.tokens_in for s in seen)

    async def act() -> None:
        draw = random.Random(2)
        ours = await hit_rate(None)
        by_chance = await hit_rate(lambda call, loads: draw.choice(sorted(loads)))
        assert ours > by_chance + 0.2, (ours, by_chance)

    run(act())


def test_a_replica_whose_engine_is_lost_is_not_well() -> None:
    async def act() -> None:
        replica = Replica(given_settings(), versions(), "r0")
        await replica.open()
        assert len(replica.plans) == 1
        replica.check()
        (served,) = replica.pool.models.values()
        assert served.engine is not None
        served.engine.close()
        while replica.pool.lost is None:
            await asyncio.sleep(0.1)
        with pytest.raises(ExecutionError, match="demo"):
            replica.check()
        await replica.close()

    run(act())


def test_versions_that_differ_are_named() -> None:
    here = versions()
    check_versions(here, here, "r0")
    assert {"jackfield", "torch", "transformers", "python"} <= here.keys()
    with pytest.raises(ExecutionError) as caught:
        check_versions({**here, "torch": "1.0", "their-plugin": "2"}, here, "r0")
    assert "torch" in str(caught.value)
    assert "their-plugin is not there" in str(caught.value)
    assert "transformers" not in str(caught.value)

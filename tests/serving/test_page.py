"""The page in a real browser: what a person asks, reads and is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from page_in_browser import (
    ANSWERED,
    KEY,
    LAST,
    SORT,
    STORY,
    ask,
    needs_browser,
    said,
    streamed,
)  # fmt: skip

from jackfield.serving.keys import new_key

if TYPE_CHECKING:
    from page_in_browser import Opened
    from served import Served


@needs_browser
def test_a_question_is_answered_as_the_engine_answers_it(opened: Opened, server: Served) -> None:
    with opened() as page:
        assert ask(page, SORT) == "7 23 41 88"
        note = page.text("#turns article:last-child .note")
        assert note.startswith("ended · 11 tokens after a prompt of 18 · ")
        assert "Answer: 7 23 41 88" in page.text("#status")
        ran = page.text("#turns article:last-child details table")
        observed = server.engine.report()["attention"]
        assert observed.name in ran
        assert observed.distribution in ran
        ask(page, "Hello!")
        assert [(m["role"], m["content"]) for m in page.bodies[-1]["messages"]] == [
            ("user", SORT), ("assistant", "7 23 41 88"), ("user", "Hello!"),
        ]  # fmt: skip
        page.click("#clear")
        ask(page, "Hello!")
        assert len(page.bodies[-1]["messages"]) == 1


@needs_browser
def test_settings_take_effect(opened: Opened, server: Served) -> None:
    wanted = {"temperature": 1.5, "top_p": 0.9, "max_completion_tokens": 24, "seed": 7}
    with opened() as page:
        for name, value in wanted.items():
            page.fill(f"#{name}", str(value))
        page.fill("#system", "Be brief.")
        page.click("#include_report")
        text = ask(page, STORY)
        messages = [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}
        ]  # fmt: skip
        assert page.bodies == [
            {
                **wanted, "model": "demo", "messages": messages, "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]  # fmt: skip
        length = {"max_new_tokens": wanted.pop("max_completion_tokens")}
        right = server.engine.generate([messages], **length, **wanted)[0]
        assert text == right.text
        assert "Which backends ran" not in page.text("#turns")
        page.click("#again")
        page.until(f"{ANSWERED} && document.querySelectorAll('article').length === 2")
        assert page.text(LAST) == text
        assert page.bodies[1] == page.bodies[0]
        page.fill("#seed", "8")
        page.click("#again")
        page.until(ANSWERED)
        assert page.text(LAST) != text


@needs_browser
def test_a_setting_that_is_no_good_is_not_sent(opened: Opened) -> None:
    with opened() as page:
        page.fill("#temperature", "-1")
        page.fill("#question", SORT)
        page.click("#send")
        assert page.run("document.activeElement.id") == "temperature"
        assert page.bodies == []
        assert page.run("document.querySelector('#question').value") == SORT
        page.fill("#temperature", "0")
        assert ask(page, SORT) == "7 23 41 88"


@needs_browser
def test_an_answer_is_stopped_and_regenerated(opened: Opened, server: Served) -> None:
    whole = server.engine.generate([[{"role": "user", "content": STORY}]], max_new_tokens=400)[0]
    before = server.engine.statistics().finished.get("cancelled", 0)
    with opened() as page:
        page.run(
            """new MutationObserver((_, observer) => {
                if (!document.querySelector('article[aria-busy=true] .text')?.textContent) return;
                document.querySelector('#stop').click();
                observer.disconnect();
            }).observe(document.querySelector('#turns'), {childList: true, subtree: true}), 0"""
        )
        text = ask(page, STORY)
        assert text
        assert whole.text.startswith(text)
        assert text != whole.text
        assert "stopped by you" in page.text("#turns article:last-child .note")
        page.until("document.querySelector('#stop').disabled")
        while server.engine.statistics().running:
            pass
        assert server.engine.statistics().finished["cancelled"] == before + 1
        page.click("#again")
        page.until(ANSWERED)
        assert page.text(LAST) == whole.text


@needs_browser
def test_tokens_come_with_their_probabilities(opened: Opened) -> None:
    with opened() as page:
        page.click("#logprobs")
        text = ask(page, SORT)
        tokens = page.run("[...document.querySelectorAll('.token')].map((one) => one.textContent)")
        assert "".join(tokens).startswith(text)
        assert len(tokens) == 11
        page.run("document.querySelector('#turns article:last-child details').open = true")
        page.click(".token")
        rows = page.run(
            """[...document.querySelectorAll('[aria-live=polite] tbody tr')]
                .map((row) => [...row.children].map((cell) => cell.textContent))"""
        )
        assert len(rows) == 5
        assert rows[0][0] == '"7"'
        shares = [float(share.removesuffix(" %")) for _, share in rows]
        assert shares == sorted(shares, reverse=True)
        assert 50 < shares[0] <= sum(shares) < 100.3


@needs_browser
def test_a_decoding_is_chosen(opened: Opened, serve: Callable[..., Served]) -> None:
    named = {"sample": "plugin:sample", "prompt_lookup": "plugin:prompt_lookup"}
    with opened(serve(models={"demo": {"model": "demo", "decoding": named}})) as page:
        page.until("document.querySelector('#decoding').options.length === 3")
        page.fill("#decoding", "prompt_lookup")
        assert ask(page, SORT) == "7 23 41 88"
        assert page.bodies[-1]["decoding"] == "prompt_lookup"
        assert "prompt_lookup" in page.text("#turns article:last-child details table")


@needs_browser
def test_html_in_an_answer_stays_text(opened: Opened) -> None:
    """Wherever a server's words are put in: answers, reasoning, tokens, reports, plans, errors."""
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    one = {"token": evil, "logprob": -0.1, "bytes": None}
    content = {"content": [{**one, "top_logprobs": [one]}]}
    report = {"decoding": {"kind": evil, "name": evil, "distribution": evil, "calls": 1}}
    with opened() as page:
        page.instead(
            "/v1/chat/completions",
            *streamed(
                said("", delta={"reasoning_content": evil}),
                said(evil, logprobs=content, finish_reason=evil),
                {"choices": [], "jackfield": {"reports": [report]}},
                {"error": {"message": evil}},
            ),
        )
        assert ask(page, evil) == evil
        page.click(".token")
        assert page.run("document.querySelectorAll('#turns img, #turns script').length") == 0
        assert page.text("#turns").count(evil) >= 9
        assert page.text("#turns [role=alert]") == evil
        assert page.run("document.title") == "jackfield"


@needs_browser
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (streamed(said("Once"), {"error": {"message": "the engine failed"}}), "the engine failed"),
        (streamed(said("Once"), done=False), "The answer broke off"),
        ((502, "text/html", "<p>Bad gateway"), "The server answered 502."),
        ((200, "text/event-stream", "data: nonsense\n\n"), "The page could not read the answer"),
    ],
    ids=["event", "broken off", "proxy", "nonsense"],
)
@pytest.mark.one_in(4)
def test_what_goes_wrong_is_said(opened: Opened, answer: Any, words: str) -> None:
    with opened(quiet=False) as page:
        page.instead("/v1/chat/completions", *answer)
        ask(page, SORT)
        assert words in page.text("#turns [role=alert]")
        assert words in page.text("#status")
        page.ask("Fetch.disable")
        page.click("#again")
        page.until(f"{ANSWERED} && !document.querySelector('[role=alert]')")
        assert page.text(LAST) == "7 23 41 88"


@needs_browser
def test_a_question_that_is_refused_is_not_asked_again(opened: Opened) -> None:
    with opened(quiet=False) as page:
        ask(page, "word " * 3000)
        assert "context" in page.text("#turns [role=alert]")
        assert ask(page, SORT) == "7 23 41 88"
        assert len(page.bodies[-1]["messages"]) == 1
        conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        page.ask("Network.emulateNetworkConditions", offline=True, **conditions)
        ask(page, SORT)
        assert "The server does not answer" in page.text("#turns article:last-child [role=alert]")


@needs_browser
def test_a_key_is_asked_for_and_kept_for_the_tab(
    opened: Opened, serve: Callable[..., Served]
) -> None:
    key, digest = new_key()
    with opened(serve(keys={"me": {"sha256": digest}}), quiet=False) as page:
        page.until(f"!{KEY}.hidden")
        assert "there is no API key" in page.text("#plan")
        page.fill("#key", "wrong")
        page.until("document.querySelector('#plan').textContent.includes('not known')")
        page.fill("#key", key)
        page.until("document.querySelector('#plan table')")
        assert ask(page, SORT) == "7 23 41 88"
        assert page.run("[sessionStorage.length, localStorage.length, document.cookie]") == [
            1, 0, "",
        ]  # fmt: skip
        page.open("about:blank")
        page.asked.clear()


@needs_browser
def test_the_plan_is_shown(opened: Opened, server: Served) -> None:
    plan = server.engine.plan.to_dict()
    with opened() as page:
        page.until("document.querySelector('#plan table')")
        shown = page.text("#plan")
        for kind, choice in plan["chosen"].items():
            assert kind in shown
            assert choice["name"] in shown
        said_first = server.engine.explain().splitlines()[:6]
        assert "\n".join(said_first) in page.text("#plan pre")
    plan["refused"] = [{"kind": "attention", "name": "x", "reasons": ["it has no window"]}]
    with opened() as page:
        body = json.dumps({"demo": {**plan, "explained": ""}})
        page.instead("/v1/plan?model=demo", 200, "application/json", body)
        page.open(server.url)
        page.until("document.querySelector('#plan table')")
        assert "attention x: it has no window" in page.text("#plan")


@needs_browser
def test_figures_are_plotted_while_somebody_looks(
    opened: Opened, server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jackfield.serving")
    labels = "[...document.querySelectorAll('#plots svg')].map((one) => one.ariaLabel)"
    with opened() as page:
        ask(page, STORY)
        page.until(f"/most [1-9]/.test({labels}[0])")
        page.click("[aria-controls=live-panel]")
        page.run("new Promise((done) => setTimeout(done, 1100))")
        count = len(page.asked)
        page.run("new Promise((done) => setTimeout(done, 1500))")
        assert len(page.asked) == count
    assert '"path": "/v1/chat/completions"' in caplog.text
    assert "/v1/report" not in caplog.text
    seen = {"tokens_out": 5, "running": 3, "waiting": 2, "cache": {"pages": 8, "pages_used": 2}}
    health = {"failure": None, "stalled": True, "inside": "attention", "ready": False}
    body = json.dumps({"demo": {"statistics": seen, "health": health}})
    with opened() as page:
        page.instead("/v1/report?model=demo", 200, "application/json", body)
        page.until("document.querySelector('#live-note').textContent")
        assert page.run("[...document.querySelectorAll('#plots b')].map((b) => b.textContent)") in (
            ["0.0", "3", "2", "25.0 %"],
            ["–", "3", "2", "25.0 %"],
        )
        assert page.text("#live-note") == "A step hangs in attention."

"""Structured output: what comes out fits, whatever the strategy; what cannot be is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from families import build, character_tokenizer

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.errors import SettingsError

pytest.importorskip("llguidance", reason="needs jackfield[structured]")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = 'start: NAME ("," NAME)*\nNAME: /[a-z]{1,4}/'
PROMPT = [{"role": "user", "content": "Extract: Ann is 31 years old."}]
STRATEGIES = {"sample": "sample", "lookup": "prompt_lookup", "assisted": "assisted"}


def fits(structure: dict[str, Any], text: str) -> bool:
    """Whether a text is what was asked for, found out without llguidance."""
    ((kind, source),) = structure.items()
    if kind == "choices":
        return text in source
    if kind == "regex":
        return re.fullmatch(source, text) is not None
    if kind == "grammar":
        return re.fullmatch(r"[a-z]{1,4}(,[a-z]{1,4})*", text) is not None
    found = json.loads(text)
    return (
        set(found) <= set(PERSON["properties"])
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and 0 <= found["age"] <= 120
        and set(found.get("tags", ())) <= {"a", "b"}
    )


STRUCTURES: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"json_schema": json.dumps(PERSON)},
    {"regex": r"[A-Z][a-z]{2,5} \d{2}"},
    {"choices": ["yes", "no", 'a\nb "c" ü']},
    {"grammar": LIST},
]
FINITE = [structure for structure in STRUCTURES if "grammar" not in structure]


@pytest.fixture(scope="module")
def engine() -> Any:
    with jackfield.load("demo", decoding=STRATEGIES, assistant_model="demo-draft") as made:
        yield made


@pytest.fixture(scope="module")
def beams() -> Any:
    with jackfield.load("demo", decoding="beam?num_beams=2") as made:
        yield made


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: next(iter(s)))
@pytest.mark.parametrize("chosen", [{}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "sampled"])
def test_what_comes_out_fits_and_no_strategy_changes_it(
    engine: Any, structure: dict[str, Any], chosen: dict[str, Any]
) -> None:
    own = [{"decoding": name} for name in STRATEGIES]
    found = engine.generate(
        [PROMPT] * len(own), settings=own, max_new_tokens=200, **structure, **chosen
    )
    assert [c.finish_reason for c in found] == ["stop"] * len(own)
    assert len({tuple(c.token_ids) for c in found}) == 1
    assert fits(structure, found[0].text)


def test_many_requests_with_a_structure_each(engine: Any) -> None:
    """Sixteen, with prompt lookup, of which some are cut by their length, among others without."""
    ages = [
        {**PERSON, "properties": {**PERSON["properties"], "age": {"const": n}}} for n in range(16)
    ]
    settings: list[dict[str, Any]] = [
        {
            "json_schema": s,
            "decoding": "lookup",
            "temperature": 1.0,
            "seed": n,
            "max_new_tokens": 6 if n % 5 == 0 else 120,
        }
        for n, s in enumerate(ages)
    ]
    plain = engine.generate(PROMPT)[0].token_ids
    found = engine.generate([PROMPT] * 18, settings=[{}, *settings, {"decoding": "lookup"}])
    assert found[0].token_ids == found[-1].token_ids == plain
    for n, completion in enumerate(found[1:-1]):
        assert completion.error is None
        if completion.finish_reason == "length":
            assert n % 5 == 0
        else:
            assert json.loads(completion.text)["age"] == n


def test_no_end_token_is_needed(engine: Any) -> None:
    (found,) = engine.generate(PROMPT, choices=["abcd"], eos_token_id=[])
    assert (found.text, found.finish_reason) == ("abcd", "stop")
    (found,) = engine.generate(PROMPT, regex="[a-z]+", eos_token_id=[], max_new_tokens=9)
    assert (len(found.token_ids), found.finish_reason) == (9, "length")
    assert re.fullmatch("[a-z]+", found.text)


@pytest.mark.parametrize("ends", [None, "<end>"])
def test_no_token_is_lost_where_the_tokenizer_ends_nothing(ends: str | None) -> None:
    """Token 0 is a space here, which is what an EOS token that nobody named was taken for."""
    tokenizer = character_tokenizer()
    tokenizer.eos_token = ends
    with jackfield.load(build("llama"), tokenizer=tokenizer) as own:
        (found,) = own.generate([5, 6, 7], regex="[ab] {3}c", max_new_tokens=12)
        assert (found.text[1:], found.finish_reason) == ("   c", "stop")
        (found,) = own.generate([5, 6, 7], regex="[ ab]+", max_new_tokens=12)
        assert (found.finish_reason, len(found.token_ids)) == ("length", 12)


def test_an_end_that_is_also_text_ends_only_what_is_whole(engine: Any) -> None:
    """Token ids of ordinary characters, which a grammar may ask for, as EOS tokens."""
    with jackfield.load(build("llama"), tokenizer=character_tokenizer()) as own:
        ends = list(range(0, 110, 5))
        found = own.generate(
            [[5, 6, n] for n in range(7, 27)], regex="[ -k]{6,9}", max_new_tokens=12,
            eos_token_id=ends,
        )  # fmt: skip
    assert all(re.fullmatch("[ -k]{6,9}", c.text) for c in found)
    assert any(c.token_ids[-1] in ends for c in found)
    (newline,) = engine._assembly.text.encode("\n")[-1:]
    (found,) = engine.generate(PROMPT, regex=r"a\nb|ab", eos_token_id=[newline])
    assert (found.text, found.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "beam"])
@pytest.mark.parametrize("structure", FINITE, ids=lambda s: next(iter(s)))
@pytest.mark.one_in(4)
def test_a_text_that_is_whole_with_its_last_token_is_not_cut(
    request: pytest.FixtureRequest, structure: dict[str, Any], strategy: str
) -> None:
    own = request.getfixturevalue("beams" if strategy == "beam" else "engine")
    asked = {**structure, **({} if strategy == "beam" else {"decoding": strategy})}
    (found,) = own.generate(PROMPT, max_new_tokens=200, eos_token_id=[], **asked)
    assert (found.finish_reason, fits(structure, found.text)) == ("stop", True)
    length = len(found.token_ids)
    (same,) = own.generate(PROMPT, max_new_tokens=length, eos_token_id=[], **asked)
    assert (same.finish_reason, same.token_ids) == ("stop", found.token_ids)
    (cut,) = own.generate(PROMPT, max_new_tokens=length - 1, eos_token_id=[], **asked)
    assert cut.finish_reason == "length"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_end_that_could_be_text_is_none(engine: Any, strategy: str) -> None:
    (newline,) = engine._assembly.text.encode("\n")[-1:]
    asked = {"eos_token_id": [newline], "sequence_bias": [[[newline], 20.0]], "decoding": strategy}
    for structure in ({"grammar": "start: /[ab]+/"}, {"regex": "[ab]+"}):
        (found,) = engine.generate(PROMPT, max_new_tokens=40, **structure, **asked)
        assert (found.finish_reason, found.token_ids[-1]) == ("stop", newline)
        assert re.fullmatch("[ab]+", found.text)
        deltas = list(engine.stream(PROMPT, max_new_tokens=40, **structure, **asked))
        assert "".join(d.text for d in deltas) == found.text == deltas[-1].completion.text


def test_penalties_and_processors_cannot_leave_the_structure(engine: Any) -> None:
    def upside_down(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores.isinf(), 100.0, -scores)

    for decoding in STRATEGIES:
        (found,) = engine.generate(
            PROMPT, regex=r"\d{3}-\d{3}", logits_processor=[upside_down], repetition_penalty=5.0,
            sequence_bias={(70,): 1e4}, decoding=decoding,
        )  # fmt: skip
        assert re.fullmatch(r"\d{3}-\d{3}", found.text)
    (found,) = engine.generate(PROMPT, choices=["a"], suppress_tokens=list(range(768)))
    assert found.finish_reason == "error"
    assert "forbid every token" in found.error


def test_streams_stops_samples_and_log_probabilities(engine: Any) -> None:
    found = engine.generate(
        PROMPT, regex=r"[a-z]{4}", num_return_sequences=4, temperature=2.0, seed=1, logprobs=2
    )
    assert len({c.text for c in found}) > 1
    assert all(re.fullmatch("[a-z]{4}", c.text) for c in found)
    assert all(len(c.logprobs) == len(c.token_ids) for c in found)
    deltas = list(engine.stream(PROMPT, regex=r"[a-z]{4}"))
    assert "".join(d.text for d in deltas) == deltas[-1].completion.text
    (found,) = engine.generate(PROMPT, regex="[ab]{8}", stop=["b"], seed=1, temperature=1.0)
    assert (found.finish_reason, "b" in found.text) == ("stop", False)


def test_preempted_requests_go_on_where_they_were() -> None:
    cache = "paged?num_tokens=104&page_size=4"
    settings = [{"json_schema": PERSON, "temperature": 1.0, "seed": n} for n in range(8)]
    with jackfield.load("demo", cache_implementation=cache) as engine:
        found = engine.generate([PROMPT] * 8, settings=settings, max_new_tokens=60)
        assert engine.statistics().preemptions > 0
        alone = [engine.generate(PROMPT, max_new_tokens=60, **own)[0] for own in settings]
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]


def test_padded_caches(engine: Any) -> None:
    for cache in ("dynamic", "static"):
        with jackfield.load("demo", cache_implementation=cache) as padded:
            found = padded.generate([PROMPT, "x"], json_schema=PERSON, max_new_tokens=100)
        expected = engine.generate([PROMPT, "x"], json_schema=PERSON, max_new_tokens=100)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": 3}, "regex must be a text"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json_schema": {"properties": {"a": False}, "required": ["a"], "type": "object"}},
         "Unsatisfiable"),
        ({"json_schema": "{"}, "is not JSON"),
        ({"json_schema": 3}, "must be an object"),
        ({"json_schema": True}, "must be an object"),
        ({"json_schema": {"const": float("nan")}}, "is not JSON"),
        ({"regex": "\ud800"}, "half a character"),
        ({"json_schema": {"$ref": "https://example.org/other"}}, "json_schema cannot be met"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"choices": []}, "list of texts"),
        ({"choices": ["a"], "regex": "b"}, "choices and regex"),
        ({"json_shema": {}}, "did you mean 'json_schema'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(engine: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        engine.generate(PROMPT, **asked)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_grammar_that_costs_too_much_ends_its_own_request(engine: Any) -> None:
    ways = [f'x{n}: "a" y{n}\ny{n}: "b{n}"\n' for n in range(2500)]
    names = " | ".join(f"x{n}" for n in range(2500))
    late = f"start: /[a-z][0-9]{{40}}/ ({names})\n" + "".join(ways)
    (alone,) = engine.generate(PROMPT, max_new_tokens=60)
    found = engine.generate([PROMPT] * 2, settings=[{"grammar": late}, {}], max_new_tokens=60)
    assert [c.finish_reason for c in found] == ["error", "stop"]
    assert found[0].error.startswith("its structure cannot be followed: grammar: ")
    assert found[0].error.isprintable()
    assert len(found[0].token_ids) >= 40
    assert found[1].token_ids == alone.token_ids
    with pytest.raises(SettingsError, match="Current row has 2501 items"):
        engine.generate(PROMPT, grammar=late.replace("[a-z][0-9]{40}", "a"))


def test_a_regex_costs_what_is_reached_of_it(engine: Any) -> None:
    (found,) = engine.generate(PROMPT, regex=r"[a-z]\d{9}(a{1000}){1000}", max_new_tokens=30)
    assert (found.finish_reason, found.error) == ("length", None)
    assert re.fullmatch(r"[a-z]\d{9}a+", found.text)


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    with (
        jackfield.load(build("llama", torch.float32)) as engine,
        pytest.raises(SettingsError, match="no tokenizer"),
    ):
        engine.generate([1, 2, 3], regex="a")


def test_a_missing_library_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install jackfield\[structured\]"):
        engine.generate(PROMPT, regex="a")


def test_threads_may_ask_at_once(engine: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda n: engine.submit(PROMPT, regex=rf"x{n}\d").result().text, range(16))
        )
    assert all(re.fullmatch(rf"x{n}\d", text) for n, text in enumerate(found))


def test_the_command_line(cli: Any, tmp_path: Any) -> None:
    done = cli("generate", "Say it", "--set", 'choices=["yes", "no"]', "--json")
    assert done.json["text"] in ("yes", "no")
    assert MODEL_PATH.is_dir()


def test_an_error_is_never_told_as_a_success(engine: Any) -> None:
    (found,) = engine.generate(PROMPT, regex="ab", min_new_tokens=10)
    assert found.finish_reason == "error"
    assert "min_new_tokens=10" in found.error


@pytest.mark.parametrize("structure", FINITE, ids=lambda s: next(iter(s)))
def test_what_is_left_of_an_error_depends_on_no_strategy(
    engine: Any, structure: dict[str, Any]
) -> None:
    own = [{"decoding": name} for name in STRATEGIES]
    found = engine.generate(
        [PROMPT] * len(own), settings=own, min_new_tokens=150, max_new_tokens=200, **structure
    )
    assert {c.finish_reason for c in found} == {"error"}
    assert fits(structure, found[0].text)
    assert len({(c.text, tuple(c.token_ids), c.error) for c in found}) == 1


def test_closing_ends_the_thread() -> None:
    with jackfield.load("demo") as engine:
        engine.generate(PROMPT, choices=["yes"])
        (thread,) = engine._assembly.structures._thread._threads
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "structure",
    [{"regex": "the end"}, {"choices": ["the end", "the other"]},
     {"json_schema": {"const": "the end"}}, {"grammar": 'start: "the" " end"'}],
    ids=lambda s: next(iter(s)),
)  # fmt: skip
def test_an_end_that_is_text_of_the_structure_is_said_by_other_tokens(
    engine: Any, structure: dict[str, Any]
) -> None:
    """One after the other, each token of the text is an end of the request."""
    own = engine._assembly.text.read("the end")
    for end in own[1:]:
        found = engine.generate(PROMPT, eos_token_id=[end], max_new_tokens=30, **structure)[0]
        assert (found.finish_reason, found.error) == ("stop", None)
        text = found.text
        assert end not in found.token_ids[:-1]
        wanted = structure.get("choices", [json.dumps("the end") if "json_schema" in structure
                                           else "the end"])  # fmt: skip
        assert text in wanted
    with pytest.raises(SettingsError, match="none but an EOS token can follow"):
        engine.generate(PROMPT, eos_token_id=own[:1], **structure)


@pytest.mark.parametrize("regex", ["", "()", "a{0}", "(|)"])
def test_a_structure_of_the_empty_text(engine: Any, regex: str) -> None:
    found = engine.generate(PROMPT, regex=regex)[0]
    assert (found.text, found.finish_reason) == ("", "stop")
    with pytest.raises(SettingsError, match="regex is met by the empty text alone"):
        engine.generate(PROMPT, regex=regex, eos_token_id=[])


def wide(count: int, key: str = "properties", *, depth: int = 0) -> dict[str, Any]:
    ways: Any = {f"p{n}": {"type": "string"} for n in range(count)}
    schema = {key: ways if key == "properties" else [{"const": n} for n in range(count)]}
    for _ in range(depth):
        schema = {"properties": {"a": schema}, "required": ["a"]}
    return {"type": "object", "additionalProperties": False, **schema}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "5,000 properties": ({"json_schema": wide(5000)}, "5000 optional properties"),
    "inside": ({"json_schema": wide(600, depth=4)}, "600 optional properties"),
    "ways": ({"json_schema": wide(600, "anyOf")}, "600 ways in one anyOf"),
    "deep": ({"json_schema": nested(5000)}, "nested too deeply"),
    "deep text": ({"json_schema": '{"a":' * 100_000}, "nested too deeply|not JSON"),
    "a long constant": ({"json_schema": {"const": "x" * 1_000_000}}, "200000 are the most"),
    "many choices": ({"choices": [f"number {n}" for n in range(100_000)]}, "200000 are the most"),
    "half a character": ({"json_schema": {"enum": ["\ud800"]}}, "json_schema"),
    "half a choice": ({"choices": ["\ud800"]}, "choices"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_fail_in_mid_text_is_refused(engine: Any, what: str) -> None:
    structure, why = REFUSED[what]
    with pytest.raises(SettingsError, match=why):
        engine.generate(PROMPT, **structure)


def test_as_many_properties_as_there_may_be(engine: Any) -> None:
    found = engine.generate(PROMPT, json_schema=wide(450), max_new_tokens=60)[0]
    assert found.error is None
    needed = wide(2000)
    needed["required"] = list(needed["properties"])
    assert engine.generate(PROMPT, json_schema=needed, max_new_tokens=20)[0].error is None


#: Ways to write a special token's spelling in which it does not stand as a whole.
WAYS: dict[str, tuple[str, Callable[[str], str]]] = {
    "escaped": ("regex", re.escape),
    "a class": ("regex", lambda s: s.replace("|", "[|]")),
    "code points": ("regex", lambda s: "".join(rf"\x{ord(c):02x}" for c in s)),
    "groups": ("regex", lambda s: "".join(f"({re.escape(c)})" for c in s)),
    "repeated": ("regex", lambda s: "".join(f"[{c}]{{1}}" for c in s)),
    "either": ("regex", lambda s: f"{re.escape(s)}|{re.escape(s)}"),
    "either case": ("regex", lambda s: "".join(f"[{c}{c.upper()}]" for c in s)),
    "strings": ("grammar", lambda s: "start: " + " ".join(json.dumps(c) for c in s)),
    "rules": ("grammar", lambda s: f"start: a b\na: {json.dumps(s[:3])}\nb: {json.dumps(s[3:])}"),
    "a string and a regex": (
        "grammar",
        lambda s: f"start: {json.dumps(s[:3])} /{re.escape(s[3:])}/",
    ),
    "an escape in a string": ("grammar", lambda s: f'start: "\\u003c{s[1:]}"'),
    "a schema in a grammar": ("grammar", lambda s: "start: %json " + json.dumps({"const": s})),
    "an escape in a schema": ("json_schema", lambda s: f'{{"const": "\\u003c{s[1:]}"}}'),
    "one of an enum": ("json_schema", lambda s: json.dumps({"enum": [s]})),
    "a pattern": (
        "json_schema",
        lambda s: json.dumps({"type": "string", "pattern": f"^{s.replace('|', '[|]')}$"}),
    ),
    "lengths": (
        "json_schema",
        lambda s: json.dumps({"const": s, "type": "string", "minLength": len(s)}),
    ),
}


@pytest.mark.parametrize("special", ["<|end|>", "<|pad|>"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_the_spelling_of_a_special_token_is_text_however_it_is_written(
    engine: Any, way: str, special: str
) -> None:
    kind, write = WAYS[way]
    own = [{"decoding": name} for name in STRATEGIES]
    asked: dict[str, Any] = {kind: write(special)}
    known = set(engine.tokenizer.all_special_ids)
    for found in engine.generate([PROMPT] * len(own), settings=own, max_new_tokens=40, **asked):
        assert (found.error, found.finish_reason) == (None, "stop"), asked
        text = json.loads(found.text) if found.text.startswith('"') else found.text
        assert text.lower() == special, asked
        assert not known & set(found.token_ids[:-1]), asked


def test_an_end_that_a_grammar_names_does_not_stand_inside_of_it(engine: Any) -> None:
    """As a token, by its name or number; whole texts alone may be followed by one."""
    for inside in ("<|end|>", "<[1]>", "<[0-1]>", "<[^2-700]>"):
        bias = [[[1], 30.0]]
        asked = {"max_new_tokens": 20, "sequence_bias": bias, "grammar": f'start: "a" {inside} "b"'}
        if inside in ("<|end|>", "<[1]>"):
            with pytest.raises(SettingsError, match="none but an EOS token can follow"):
                engine.generate(PROMPT, **asked)
            continue
        own = [{"decoding": name} for name in STRATEGIES]
        for found in engine.generate([PROMPT] * len(own), settings=own, **asked):
            assert (found.error, found.finish_reason) == (None, "stop")
            assert found.text.startswith("a")
            assert found.text.endswith("b")
            assert 1 not in found.token_ids[:-1]
    looping = 'start: "a" (<[0-9]>){5} "b"'
    for name in STRATEGIES:
        (found,) = engine.generate(
            PROMPT, grammar=looping, decoding=name, sequence_bias=[[[1], 30.0]], max_new_tokens=9
        )
        assert (found.error, found.finish_reason, found.text[-1]) == (None, "stop", "b")
    late = 'start: /[ab]{20}/ <|end|> "b"'
    (alone,) = engine.generate(PROMPT, max_new_tokens=60)
    found = engine.generate([PROMPT] * 2, settings=[{"grammar": late}, {}], max_new_tokens=60)
    assert found[0].finish_reason == "error"
    assert "forbid every token" in found[0].error
    assert found[1].token_ids == alone.token_ids


@pytest.mark.parametrize("special", ["<|end|>", "<|pad|>"])
@pytest.mark.parametrize("kind", ["choices", "regex", "grammar", "json_schema"])
def test_the_spelling_of_a_special_token_is_text(
    engine: jackfield.Engine, kind: str, special: str
) -> None:
    """Where nothing else may follow, too; the tokenizer itself would cut it as that token."""
    for text in (f"a{special}b", special):
        _is_text(engine, kind, text)


def _is_text(engine: jackfield.Engine, kind: str, text: str) -> None:
    structure: dict[str, Any] = {
        "choices": [text], "regex": re.escape(text), "grammar": f'start: "{text}"',
        "json_schema": {"const": text},
    }  # fmt: skip
    (found,) = engine.generate(PROMPT, max_new_tokens=40, **{kind: structure[kind]})
    wanted = f'"{text}"' if kind == "json_schema" else text
    assert (found.error, found.finish_reason, found.text) == (None, "stop", wanted)

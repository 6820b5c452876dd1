"""Which replica a prompt goes to."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.replicas.prefixes import BLOCK, MOST, OpenRequests, Prefixes, blocks, ends

NAMES = st.sampled_from("abcdefgh")
LOADS = st.dictionaries(NAMES, st.integers(0, 40), min_size=1)
CHAINS = st.lists(st.integers(0, 5), max_size=6).map(
    lambda parts: tuple(hash(tuple(parts[: n + 1])) for n in range(len(parts)))
)
STEPS = st.lists(st.tuples(CHAINS, LOADS), min_size=1, max_size=40)


@given(STEPS, st.integers(0, 6), st.floats(1.0, 3.0), st.integers(1, 30))
def test_the_choice_is_there_within_the_bound_and_memory_is_bounded(
    steps: list[tuple[tuple[int, ...], dict[str, int]]], slack: int, factor: float, capacity: int
) -> None:
    prefixes = Prefixes(capacity, slack, factor)
    for chain, loads in steps:
        found = prefixes.choose(chain, loads)
        assert sorted(found) == sorted(loads)  # nobody who is gone, nobody left out
        least = min(loads.values())
        assert loads[found[0]] <= max(least + slack, least * factor)
        rest = [loads[name] for name in found[1:]]
        assert rest == sorted(rest)
        assert len(prefixes) <= capacity


@given(STEPS, CHAINS, LOADS)
def test_the_same_beginning_goes_to_the_same_replica_while_its_load_allows(
    steps: list[tuple[tuple[int, ...], dict[str, int]]], chain: tuple[int, ...],
    loads: dict[str, int],
) -> None:  # fmt: skip
    prefixes = Prefixes()
    for before, there in steps:
        prefixes.choose(before, there)
    chain = (*chain, -1)  # of which nobody has read all
    first = prefixes.choose(chain, loads)[0]
    again = {**loads, first: min(loads.values())}  # nobody has fewer
    assert prefixes.choose((*chain, -2, -3), again)[0] == first
    if len(loads) > 1:
        others = [load for name, load in loads.items() if name != first]
        fuller = {**loads, first: 1000 + max(others)}
        other = prefixes.choose(chain, fuller)[0]
        assert other != first
        assert prefixes.choose(chain, dict.fromkeys(loads, 0))[0] in (first, other)


def test_the_longest_beginning_decides_and_new_ones_go_to_who_has_the_fewest() -> None:
    prefixes = Prefixes()
    idle = {"a": 0, "b": 0, "c": 0}
    assert prefixes.choose((1, 2), idle)[0] == "a"
    assert prefixes.choose((5, 6), idle)[0] == "b"  # not the one that was just chosen
    assert prefixes.choose((1, 9), {"a": 9, "b": 9, "c": 0})[0] == "c"
    assert prefixes.choose((1, 2, 3), idle)[0] == "a"
    assert prefixes.choose((1, 9, 4), idle)[0] == "c"
    assert prefixes.choose((7,), {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]


def test_long_prompts_do_not_drive_out_the_short_beginning_that_all_share() -> None:
    prefixes = Prefixes(capacity=40)  # less than one of the prompts
    shared = tuple(range(1000, 1008))
    prefixes.choose(shared, {"a": 0, "b": 0})
    for n in range(40):
        own = tuple(range(n * 100, n * 100 + 40))
        prefixes.choose((*shared, *own), {"a": 0, "b": 0})
    assert prefixes.choose(shared, {"a": 3, "b": 0})[0] == "a"


def chat(*texts: str, **more: object) -> dict[str, object]:
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": text}
                for n, text in enumerate(texts)]  # fmt: skip
    return {"model": "demo", "messages": messages, **more}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


def test_a_conversation_that_goes_on_begins_as_before() -> None:
    first = blocks("", chat("x" * 300))
    second = blocks("", chat("x" * 300, "y" * 200, "z"))
    assert len(first) >= 300 // BLOCK
    assert common(first, second) == len(first)
    other = blocks("", chat("w" + "x" * 299))
    assert common(first, other) <= 1


@pytest.mark.parametrize(
    "other",
    [chat("x" * 300, model="another"), chat("x" * 300, cache_salt="s"),
     chat("x" * 300, tools=[{"type": "function"}]), chat("x" * 300, prompt_cache_key="k"),
     chat("x" * 300, instructions="Be brief."), chat("x" * 300, previous_response_id="resp_1")],
)  # fmt: skip
def test_what_stands_before_a_prompt_makes_it_another(other: dict[str, object]) -> None:
    assert not common(blocks("", chat("x" * 300)), blocks("", other))
    assert not common(blocks("", chat("x" * 300)), blocks("ann", chat("x" * 300)))


def test_settings_of_the_answer_do_not_count_and_long_prompts_are_bounded() -> None:
    assert blocks("", chat("x" * 300)) == blocks("", chat("x" * 300, temperature=0.5, stream=True))
    longest, half = blocks("", {"prompt": "x" * 10**6}), blocks("", {"prompt": "x" * (MOST // 2)})
    assert longest == blocks("", {"prompt": "x" * MOST}) != half
    assert len(longest) < 50
    assert blocks("", {"prompt": [1, 2, 3] * 100})
    assert blocks("", {}) == ()


@given(st.integers(0, 10 * MOST))
def test_beginnings_are_told_apart_to_an_eighth(length: int) -> None:
    found = list(ends(length))
    assert found == [end for end in ends(20 * MOST) if end <= length]
    assert all(end % BLOCK == 0 for end in found)
    for one, other in itertools.pairwise([0, *found, length]):
        assert one <= other < one + max(BLOCK, one / 8) + BLOCK


def test_of_many_replicas_the_best_and_some_others_are_named() -> None:
    prefixes, loads = Prefixes(), {f"r{n}": n % 7 + 1 for n in range(500)}
    loads["r123"] = 0
    found = prefixes.choose((1, 2), loads)
    assert found[0] == "r123"
    assert len(set(found)) == len(found) > 20
    assert [loads[name] for name in found] == sorted(loads[name] for name in found)
    assert prefixes.choose((1, 2, 3), loads)[0] == "r123"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), NAMES), max_size=60))
def test_open_requests_are_counted_where_they_are(
    steps: list[tuple[bool, int, str]],
) -> None:
    requests, places = OpenRequests(), dict[int, str]()
    for begins, request, name in steps:
        if begins:
            requests.begin(str(request), name)
            places[request] = name
        else:
            requests.end(str(request), name)
            if places.get(request) == name:
                del places[request]
        held = list(places.values())
        assert requests.loads("abcdefgh") == {n: held.count(n) for n in "abcdefgh"}


def hit_rate(choose: Callable[[tuple[int, ...], dict[str, int]], str]) -> float:
    """Share of blocks found, of conversations of eight turns over four replicas whose caches hold
    a third of all of them.
    """
    caches = {name: OrderedDict[int, None]() for name in "abcd"}
    draw = random.Random(3)
    turns = [(draw.random() + turn, who, turn) for who in range(60) for turn in range(8)]
    found = total = 0
    for _, who, turn in sorted(turns):
        chain = tuple(hash((who, n)) for n in range(4 * (turn + 1)))
        cache = caches[choose(chain, dict.fromkeys(caches, 0))]
        found += sum(block in cache for block in chain)
        total += len(chain)
        for block in reversed(chain):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > 60 * 32 // 3:
            cache.popitem(last=False)
    return found / total


def test_more_is_found_than_by_chance() -> None:
    prefixes, draw = Prefixes(), random.Random(5)
    ours = hit_rate(lambda chain, loads: prefixes.choose(chain, loads)[0])
    by_chance = hit_rate(lambda chain, loads: draw.choice(sorted(loads)))
    assert ours == 28 / 36  # all but what is new in each turn
    assert ours > 2 * by_chance, (ours, by_chance)

"""Stories and sentences for the demo model's training text; standard library only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "ANIMALS",
    "COLORS",
    "NAMES",
    "OBJECTS",
    "PLACES",
    "Scene",
    "Story",
    "scene",
    "sentences",
    "story",
]

T = TypeVar("T")
Likely = Callable[[random.Random, Sequence[str]], str]

NAMES = (
    "Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Sara", "Leo",
    "Nina", "Sam", "Emma", "Jack", "Rosa", "Paul", "Lucy", "Tim",
)  # fmt: skip
OBJECTS = (
    "ball", "kite", "drum", "book", "lamp", "coin", "key", "hat",
    "cup", "map", "box", "bell", "rope", "shell", "stone", "spoon",
)  # fmt: skip
PLACES = (
    "garden", "kitchen", "forest", "park", "barn", "school",
    "market", "tower", "cave", "river", "castle", "field",
)  # fmt: skip
COLORS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")
ANIMALS = (
    "fox", "cat", "dog", "bear", "rabbit", "mouse",
    "bird", "frog", "horse", "duck", "wolf", "sheep",
)  # fmt: skip
TRAITS = ("little", "brave", "kind", "happy", "shy", "clever")


@dataclass(frozen=True)
class Scene:
    """A few people, each with an object in a place, and the text that says so."""

    text: str
    facts: tuple[tuple[str, str, str], ...]
    """One (name, object, place) a person; no value occurs twice."""


@dataclass(frozen=True)
class Story:
    """A whole short story and the facts that a listener may ask about."""

    text: str
    hero: str
    friend: str
    thing: str
    place: str
    animal: str
    color: str


OPENINGS = (
    "",
    "It was a sunny day. ",
    "One morning the friends went out to play. ",
    "It was cold and dark. ",
    "Everybody was happy. ",
)
FACTS = (
    "{name} found a {thing} in the {place}.",
    "{name} had a {thing} in the {place}.",
    "{name} saw a {thing} in the {place}.",
    "{name} took a {thing} to the {place}.",
)


def scene(rng: random.Random, people: int) -> Scene:
    """A text about `people` persons in which every name, object and place is used once."""
    facts = tuple(
        zip(
            rng.sample(NAMES, people),
            rng.sample(OBJECTS, people),
            rng.sample(PLACES, people),
            strict=True,
        )
    )
    told = (rng.choice(FACTS).format(name=n, thing=t, place=p) for n, t, p in facts)
    return Scene(rng.choice(OPENINGS) + " ".join(told), facts)


PLAIN = (
    "The {animal} sat near the {color} {thing}.",
    "{name} gave the {thing} to {other}.",
    "A {color} {animal} ran to the {place}.",
    "{name} and {other} walked to the {place}.",
    "The {thing} in the {place} was {color}.",
    "{name} likes the {color} {thing}.",
    "We saw a {animal} in the {place} with {name}.",
    "{other} put the {color} {thing} in the box for the {animal}.",
)


def sentences(rng: random.Random, count: int) -> str:
    """`count` unconnected sentences: material for copying and editing."""
    return " ".join(_sentence(rng) for _ in range(count))


def _sentence(rng: random.Random) -> str:
    name, other = rng.sample(NAMES, 2)
    return rng.choice(PLAIN).format(
        name=name,
        other=other,
        animal=rng.choice(ANIMALS),
        color=rng.choice(COLORS),
        thing=rng.choice(OBJECTS),
        place=rng.choice(PLACES),
    )


BEGINNINGS = (
    "Once upon a time there was a {trait} {animal} named {hero}.",
    "Once there was a {animal} named {hero} who lived near the {place}.",
    "{hero} was a {trait} {animal}.",
)
WISHES = (
    "{hero} liked to play in the {place}.",
    "Every day {hero} went to the {place} to play.",
    "{hero} wanted to find a friend in the {place}.",
)
FINDS = (
    "One day {hero} found a {color} {thing} in the {place}.",
    "One morning {hero} saw a {color} {thing} in the {place}.",
)
TROUBLES = (
    "But the {thing} was too heavy.",
    "But the {thing} fell into the water.",
    "But then it began to rain, and the {thing} was wet.",
    "But {hero} was too small to carry the {thing}.",
)
HELPS = (
    'Then {friend} the {other} came and said, "I can help you, {hero}!"',
    '{hero} called {friend} the {other}. "Please help me," said {hero}.',
)
TURNS = (
    "Together {hero} and {friend} carried the {thing} home.",
    "{friend} was strong, and soon the {thing} was safe.",
    "They worked all day, and then they had the {thing} back.",
)
ENDS = (
    "{hero} was very happy. From that day on, {hero} and {friend} were best friends.",
    '"Thank you, {friend}," said {hero}. They played with the {color} {thing} until night.',
    "At last {hero} and {friend} went home and slept well. The end.",
)


def story(
    rng: random.Random,
    animal: str | None = None,
    thing: str | None = None,
    *,
    even: bool = False,
) -> Story:
    """A short story about one hero; `animal` and `thing` may be asked for.

    Early entries of every list are likelier than late ones, so that a next word is often clear: a
    greedy continuation then depends on what was learned and not on a tie. With `even` all are
    equally likely, so that a question about the story cannot be answered by guessing.
    """
    likely = _evenly if even else _by_rank
    hero, friend = _two(rng, NAMES, likely)
    first, other = _two(rng, ANIMALS, likely)
    words = {
        "hero": hero,
        "friend": friend,
        "animal": animal or first,
        "other": other if other != animal else first,
        "thing": thing or likely(rng, OBJECTS),
        "place": likely(rng, PLACES),
        "color": likely(rng, COLORS),
        "trait": likely(rng, TRAITS),
    }
    parts = (BEGINNINGS, WISHES, FINDS, TROUBLES, HELPS, TURNS, ENDS)
    text = " ".join(likely(rng, part).format(**words) for part in parts)
    return Story(
        text, hero, friend, words["thing"], words["place"], words["animal"], words["color"]
    )


def _by_rank(rng: random.Random, options: Sequence[T]) -> T:
    return rng.choices(options, [1 / (rank + 1) for rank in range(len(options))])[0]


def _evenly(rng: random.Random, options: Sequence[T]) -> T:
    return rng.choice(options)


def _two(rng: random.Random, options: Sequence[str], likely: Likely) -> tuple[str, str]:
    first = likely(rng, options)
    return first, likely(rng, [option for option in options if option != first])

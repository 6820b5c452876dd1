"""The demo model's tasks: items with exact answers, and the text that it learns from.

Everything is generated, from the standard library alone. An item belongs to the held-out part or to
the training part by a stable hash of its content (not of its wording: `34 + 28` and `28 + 34` fall
on the same side however they are asked), so the two can never meet.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jackfield.demo import stories

__all__ = [
    "FIRST_MIXTURE",
    "LAST_MIXTURE",
    "TASKS",
    "Document",
    "Item",
    "documents",
    "heldout",
    "is_heldout",
    "training_item",
]


@dataclass(frozen=True)
class Item:
    """One question with the only right answer."""

    task: str
    prompt: str
    answer: str

    def matches(self, text: str) -> bool:
        """Whether `text` is the answer, but for white space around it."""
        return text.strip() == self.answer.strip()


Keyed = tuple[str, str, str]
"""The content that decides between training and held-out, the prompt, the answer."""

Document = tuple[tuple[str, str], ...]
"""Training text: (role, text) messages; the one role `text` stands for text without chat marks."""


def is_heldout(key: str) -> bool:
    """Whether an item with this content is kept out of training: one in eight is."""
    return hashlib.sha256(key.encode()).digest()[0] % 8 == 0


def heldout(task: str, count: int, seed: int = 0) -> list[Item]:
    """`count` different items of `task` that training never shows, the same for the same seed."""
    rng = random.Random(f"heldout {task} {seed}")
    found: dict[str, Item] = {}
    while len(found) < count:
        key, prompt, answer = MAKERS[task](rng)
        if is_heldout(key):
            found[prompt] = Item(task, prompt, answer)
    return list(found.values())


def training_item(task: str, rng: random.Random) -> Item:
    """One item of `task` that `heldout` can never return."""
    while True:
        key, prompt, answer = EXERCISES[task](rng)
        if not is_heldout(key):
            return Item(task, prompt, answer)


def documents(rng: random.Random, mixture: Mapping[str, float]) -> Iterator[Document]:
    """Endless training text: items of all tasks, stories, and a little talk."""
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        if kind in EXERCISES:
            item = training_item(kind, rng)
            document: Document = (("user", item.prompt), ("assistant", item.answer))
        else:
            document = TALKS[kind](rng)
        if document[0][0] == "user" and rng.random() < 0.08:
            document = (("system", rng.choice(SYSTEMS)), *document)
        yield document


def _arithmetic(rng: random.Random) -> Keyed:
    first, second = rng.randrange(100), rng.randrange(100)
    if rng.random() < 0.5:
        sign, result, low, high = "+", first + second, min(first, second), max(first, second)
    else:
        first, second = max(first, second), min(first, second)
        sign, result, low, high = "-", first - second, second, first
    asked = f"{first} {sign} {second}"
    prompt = rng.choice(("What is {}?", "Calculate {}.", "How much is {}?")).format(asked)
    return f"{low} {sign} {high}", prompt, f"{asked} = {result}"


def _sort(rng: random.Random) -> Keyed:
    numbers = rng.sample(range(100), rng.randint(3, 6))
    shown = " ".join(map(str, numbers))
    down = rng.random() < 0.3
    result = " ".join(map(str, sorted(numbers, reverse=down)))
    prompt = (
        f"Sort these numbers from high to low: {shown}"
        if down
        else rng.choice(("Sort these numbers: {}", "Put these numbers in order: {}")).format(shown)
    )
    return f"sort {shown}", prompt, result


def _reverse(rng: random.Random) -> Keyed:
    if rng.random() < 0.4:
        things = [str(number) for number in rng.sample(range(100), rng.randint(3, 6))]
    else:
        words = stories.OBJECTS + stories.ANIMALS + stories.PLACES + stories.COLORS
        things = rng.sample(words, rng.randint(3, 6))
    shown = ", ".join(things)
    prompt = rng.choice(("Reverse this list: {}", "Write this list backwards: {}")).format(shown)
    return f"reverse {shown}", prompt, ", ".join(reversed(things))


def _copy(rng: random.Random) -> Keyed:
    return _copied(rng, stories.sentences(rng, rng.randint(1, 7)))


def _copied(rng: random.Random, text: str) -> Keyed:
    prompt = rng.choice(("Copy this text: {}", "Repeat this text: {}")).format(text)
    return f"copy {text}", prompt, text


def _copy_any(rng: random.Random) -> Keyed:
    """With codes in between, which cannot be guessed from the language."""
    return _copied(rng, _codes(rng)) if rng.random() < 0.15 else _copy(rng)


def _codes(rng: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    lengths = [rng.randint(2, 4) for _ in range(rng.randint(2, 5))]
    return " ".join("".join(rng.choices(letters, k=length)) for length in lengths)


def _edit(rng: random.Random) -> Keyed:
    text = stories.sentences(rng, rng.randint(2, 6))
    groups = (stories.NAMES, stories.OBJECTS, stories.PLACES, stories.ANIMALS, stories.COLORS)
    # Longest first is not needed: no word of these lists is a part of another or of a template.
    present = [(word, group) for group in groups for word in group if f" {word}" in f" {text}"]
    old, group = rng.choice(present)
    new = rng.choice([word for word in group if word not in text])
    prompt = f"Replace {old} with {new} in: {text}"
    return f"edit {text}", prompt, text.replace(old, new)


CITIES = ("Paris", "London", "Rome", "Berlin", "Oslo", "Madrid", "Cairo", "Lima", "Tokyo", "Delhi")
JOBS = ("baker", "doctor", "farmer", "teacher", "painter", "singer", "pilot", "driver")
PROFILES = (
    "{name} is {age} years old and lives in {city}. {name} works as a {job}.",
    "{name} is a {job} from {city} who is {age} years old.",
    "The {job} {name} lives in {city} and is {age} years old.",
    "In {city} lives a {job}. The name is {name} and the age is {age}.",
)
FIELDS = (
    ("name", "age", "city"),
    ("name", "city", "age"),
    ("name", "age"),
    ("name", "job"),
    ("name", "job", "city"),
    ("city", "age"),
    ("name", "age", "city", "job"),
)


def _json(rng: random.Random) -> Keyed:
    person = {
        "name": rng.choice(stories.NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
    }
    fields = rng.choice(FIELDS)
    asked = f"{', '.join(fields[:-1])} and {fields[-1]}"
    text = rng.choice(PROFILES).format(**person)
    answer = json.dumps({field: person[field] for field in fields})
    return f"json {person}", f"Extract {asked} as JSON: {text}", answer


TALK_QUESTIONS = (
    ("Who is the story about?", "The story is about {hero}."),
    ("Who helped?", "{friend} helped {hero}."),
    ("What was found?", "{hero} found the {thing}."),
    ("Where was it?", "The {thing} was in the {place}."),
)
STORY_QUESTIONS = (
    *TALK_QUESTIONS,
    ("What color was the {thing}?", "The {thing} was {color}."),
    ("What animal was {hero}?", "{hero} was a {animal}."),
)
SCENE_QUESTIONS = (
    ("Who has the {thing}?", "{name} has the {thing}."),
    ("What does {name} have?", "{name} has the {thing}."),
    ("Where is {name}?", "{name} is in the {place}."),
    ("Where is the {thing}?", "The {thing} is in the {place}."),
)


def _story_questions(rng: random.Random) -> Keyed:
    told = stories.story(rng, even=True)
    question, answer = _about(told, rng.choice(STORY_QUESTIONS))
    return f"story {told.text}", f"{told.text} {question}", answer


def _about(told: stories.Story, wording: tuple[str, str]) -> tuple[str, str]:
    question, answer = wording
    return question.format(**vars(told)), answer.format(**vars(told))


def _scene_questions(rng: random.Random) -> Keyed:
    told = stories.scene(rng, rng.randint(2, 3))
    question, answer = _question(rng, rng.choice(told.facts))
    return f"story {told.text}", f"{told.text} {question}", answer


def _question(rng: random.Random, fact: tuple[str, str, str]) -> tuple[str, str]:
    name, thing, place = fact
    question, answer = rng.choice(SCENE_QUESTIONS)
    words = {"name": name, "thing": thing, "place": place}
    return question.format(**words), answer.format(**words)


MAKERS: dict[str, Callable[[random.Random], Keyed]] = {
    "arithmetic": _arithmetic,
    "sort": _sort,
    "reverse": _reverse,
    "copy": _copy,
    "edit": _edit,
    "json": _json,
    "story_questions": _story_questions,
}
EXERCISES: dict[str, Callable[[random.Random], Keyed]] = {
    **MAKERS,
    "copy any": _copy_any,
    "scene questions": _scene_questions,
}
"""The tasks, and what is trained like them but not asked: too hard for so small a model."""

TASKS: tuple[str, ...] = tuple(MAKERS)
"""The names of the tasks, in the order in which a table shows them."""


SYSTEMS = ("You are a helpful assistant.", "Answer the question.", "You are a kind storyteller.")
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a nice day."),
    ("Who are you?", "I am a very small language model. I was trained on generated text."),
    (
        "What can you do?",
        "I can tell stories, do sums, sort lists, copy and edit text, and write JSON.",
    ),
)


def _free_story(rng: random.Random) -> Document:
    return (("text", stories.story(rng).text),)


def _request(rng: random.Random) -> tuple[str, stories.Story]:
    animal, thing = rng.choice(stories.ANIMALS), rng.choice(stories.OBJECTS)
    choice = rng.randrange(4)
    if choice == 0:
        return "Tell me a story.", stories.story(rng)
    if choice == 1:
        told = stories.story(rng, animal, thing)
        return f"Tell me a story about a {animal} and a {thing}.", told
    return f"Tell me a story about a {animal}.", stories.story(rng, animal)


def _told_story(rng: random.Random) -> Document:
    asked, told = _request(rng)
    return (("user", asked), ("assistant", told.text))


def _story_talk(rng: random.Random) -> Document:
    """A story and a question about it, or people with their things and two questions."""
    if rng.random() < 0.5:
        asked, told = _request(rng)
        question, answer = _about(told, rng.choice(TALK_QUESTIONS))
        return (
            ("user", asked),
            ("assistant", told.text),
            ("user", question),
            ("assistant", answer),
        )
    while is_heldout(f"story {(shown := stories.scene(rng, rng.randint(2, 3))).text}"):
        pass
    first, second = (_question(rng, fact) for fact in rng.sample(shown.facts, 2))
    return (
        ("user", f"{shown.text} {first[0]}"),
        ("assistant", first[1]),
        ("user", second[0]),
        ("assistant", second[1]),
    )


def _small_talk(rng: random.Random) -> Document:
    asked, answer = rng.choice(SMALL_TALK)
    return (("user", asked), ("assistant", answer))


TALKS: dict[str, Callable[[random.Random], Document]] = {
    "free story": _free_story,
    "told story": _told_story,
    "story talk": _story_talk,
    "small talk": _small_talk,
}
FIRST_MIXTURE: dict[str, float] = {
    "arithmetic": 45,
    "sort": 11,
    "reverse": 9,
    "copy any": 7,
    "edit": 9,
    "json": 8,
    "scene questions": 28,
    "free story": 4,
    "told story": 4,
    "story talk": 5,
    "small talk": 1.5,
}
"""How many documents of each kind there are, in proportion: short items need many to count."""

LAST_MIXTURE: dict[str, float] = {
    "arithmetic": 20,
    "sort": 30,
    "reverse": 8,
    "copy": 10,
    "edit": 9,
    "json": 6,
    "story_questions": 16,
    "free story": 4,
    "told story": 4,
    "story talk": 3,
    "small talk": 2,
}
"""The same for the last part of the training: the tasks as they are asked."""

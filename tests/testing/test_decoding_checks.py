"""The checks of decodings: right ones pass, and each of the zoo is caught by its fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding import ZOO, Lookup, of
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield import contracts
from jackfield.contracts import Decoding, DecodingCapabilities, Strategy
from jackfield.testing.checks import verdict
from jackfield.testing.subject import uninstalled
from jackfield.testing.suites import checks_of
from jackfield_plugins.decoding.assisted import Assisted
from jackfield_plugins.decoding.beam import Beam
from jackfield_plugins.decoding.mtp import Mtp
from jackfield_plugins.decoding.prompt_lookup import PromptLookup
from jackfield_plugins.decoding.sample import Sample

SAMPLE = (
    "no bound on drafts", "the last one's drafts for all", "begins with the last token",
    "keeps sequences after release", "changes an early token of a long text",
    "does not ask for rollback", "another beam's score", "no length penalty",
)  # fmt: skip


def test_the_search_of_the_docs_keeps_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
    (code,) = re.findall(r"```python\n(class Greedy.*?)```", page, re.DOTALL)
    names: dict[str, Any] = vars(contracts).copy()
    exec(compile(code, "docs/hooks.md", "exec"), names)  # noqa: S102 - our own page
    made = of(names["Greedy"], forks=True, rollback=False, settings=frozenset())
    with uninstalled(made()) as subject:
        rules = ("beams.rules", "beams.forbidden", "beams.eos", "beams.stop_strings")
        assert_right([verdict(c) for c in checks_of(subject) if c.name in rules], 4)


class Again(Strategy):
    """The last token once more: a guess that is seldom right."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return [sequence.tokens[-1:] for sequence in sequences]


class Bare(Decoding):
    """Honours nothing but what the loop does."""

    name = "bare"
    capabilities = DecodingCapabilities()

    def bind(self, context: Any) -> Strategy:
        return Again()


class OneLayer(Assisted):
    """Its draft model is the first layer of any model."""

    name = "one-layer"

    def early_exit(self, options: Any) -> int:
        return 1


RIGHT: dict[str, Callable[[], Decoding]] = {
    "sample": Sample, "assisted": Assisted, "beam": Beam, "prompt_lookup": PromptLookup,
    "one-layer": OneLayer, "mtp": Mtp,
    "lookup": of(Lookup), "again": of(Again), "bare": Bare,
}  # fmt: skip


def test_a_right_decoding_of_few_capabilities_passes() -> None:
    assert_right(judged(Bare))


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_right_decodings_pass(name: str) -> None:
    assert_right(judged(RIGHT[name]))


@pytest.mark.parametrize("wrong", sampled(ZOO, SAMPLE), ids=str)
def test_a_wrong_decoding_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)

"""The checks of caches: right ones of many designs pass, and each of the zoo is caught."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import transformers
from cache import ZOO
from hypothesis.internal.conjecture import providers
from right_caches import DESIGNS, Design, Right
from wrong import Wrong, assert_caught, assert_right, judged, sampled

from jackfield.contracts import BindContext, Cache, CacheCapabilities, TransformersCache
from jackfield.testing.checks import Verdict, verdict
from jackfield.testing.subject import subject_of, uninstalled
from jackfield.testing.suites import checks_of

BY_HAND = ("store.*", "continuous.*", "prefixes.*", "rollback.*", "forks.*", "static_shapes.*")
BRIEFLY = (*BY_HAND, "recordable.*", "engine.drafts", "transformers.*")

SAMPLE = (
    "pages: forks without copying", "pages: lets go early", "pages: shares by the last page",
    "pages: comes back in another order", "pages: keeps the model's tensors",
    "pages: takes back pages", "rows: keys are values", "rows: crops one less",
    "rows: static that moves", "packed: one row for all", "padded: prepare with other tokens",
)  # fmt: skip


class LeastRows(TransformersCache):
    """The least that is right: one layer type, one dtype, nothing else."""

    name = "least"
    capabilities = CacheCapabilities(
        layout="padded",
        layer_types=frozenset({"full_attention"}),
        dtypes=frozenset({"float32"}),
    )

    def make(self, context: BindContext, length: int | None) -> Any:
        return transformers.DynamicCache(config=context.config)


class LeastPages(Right):
    """The same in pages."""

    name = "least"
    capabilities = CacheCapabilities(
        layout="packed",
        layer_types=frozenset({"full_attention"}),
        dtypes=frozenset({"float32"}),
    )


def found_of(subject: Any, patterns: tuple[str, ...]) -> list[Verdict]:
    chosen = [
        check for check in checks_of(subject) if any(fnmatchcase(check.name, p) for p in patterns)
    ]
    assert len(chosen) > 5
    return [verdict(check) for check in chosen]


@pytest.mark.parametrize("selection", ["paged", "dynamic", "static", "paged?memory=0.001"])
def test_the_built_in_caches_pass(selection: str) -> None:
    found = found_of(subject_of(f"plugin:{selection}", "cache"), BRIEFLY)
    assert_right(found, 6)


@pytest.mark.long
@pytest.mark.parametrize(
    "selection",
    ["paged", "dynamic", "static", "quantized?backend=fp8", "paged?memory=0.001"],  # as on a GPU
)
def test_the_built_in_caches_pass_as_a_whole(selection: str) -> None:
    found = found_of(subject_of(f"plugin:{selection}", "cache"), ("*",))
    assert_right(found, 21)


def test_storms_do_not_depend_on_what_else_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis would read the source of all libraries that lie outside `site-packages`."""

    def local(path: str) -> bool:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr(providers, "_sys_modules_len", None)
    monkeypatch.setattr(providers, "_seen_modules", set())
    monkeypatch.setattr(providers, "is_local_module_file", local)
    subject = subject_of("plugin:paged", "cache")
    (found,) = (verdict(check) for check in checks_of(subject) if check.name == "storm.plain")
    assert found.outcome == "passed", found


@pytest.mark.parametrize("selection", ["offloaded", "offloaded_static", "quantized"])
def test_what_a_machine_cannot_try_is_not_a_failure(selection: str) -> None:
    found = found_of(subject_of(f"plugin:{selection}", "cache"), BY_HAND)
    assert {one.outcome for one in found} == {"not tried"}
    assert all("refuses every model here" in one.message for one in found)


@pytest.mark.parametrize(
    "backend", [LeastRows, lambda: LeastPages(Design())], ids=["rows", "pages"]
)
def test_a_right_cache_with_few_capabilities_passes(backend: Callable[[], Cache]) -> None:
    with uninstalled(backend()) as subject:
        found = found_of(subject, ("store.*", "refused.*"))
    assert_right(found)
    refused = [one.name for one in found if one.outcome == "refused"]
    assert {"refused.forks", "refused.compiles", "refused.dtypes.float16"} <= set(refused)


@pytest.mark.parametrize("name", ["a cache that swaps and shares"])
@pytest.mark.long
def test_right_pages_of_strangers_pass(name: str) -> None:
    with uninstalled(Right(DESIGNS[name])) as subject:
        assert_right(found_of(subject, BY_HAND))


@pytest.mark.long
@pytest.mark.parametrize("name", DESIGNS)
def test_all_right_pages_pass_as_a_whole(name: str) -> None:
    assert_right(judged(lambda: Right(DESIGNS[name])))


@pytest.mark.parametrize("wrong", sampled(ZOO, SAMPLE), ids=str)
@pytest.mark.one_in(4)
def test_a_wrong_cache_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", ZOO, ids=str)
def test_the_whole_zoo_is_caught(wrong: Wrong) -> None:
    assert_caught(wrong)


def test_the_zoo_is_large() -> None:
    assert len(ZOO) > 150

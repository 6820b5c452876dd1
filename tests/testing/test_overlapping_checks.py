"""Caches that say `overlaps`: what they do with tokens that are not known yet is seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield.testing.checks import Verdict, verdict
from jackfield.testing.subject import subject_of
from jackfield.testing.suites import checks_of
from jackfield_plugins.cache.paged import PagedCache, store

if TYPE_CHECKING:
    import pytest


def overlapping(folder: Path, name: str) -> Verdict:
    checks = checks_of(subject_of(name, "cache", folder))
    (found,) = (verdict(check) for check in checks if check.name == "engine.overlapping")
    return found


def test_the_paged_cache(tmp_path: Path) -> None:
    assert overlapping(tmp_path, "paged").outcome == "passed"


def test_one_that_keeps_pages_by_what_prepare_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are found by a placeholder, by whoever goes on with that token."""

    class Early(store.PagedKVCache):
        def prepare(self, step: Any) -> Any:
            found = super().prepare(step)
            for item in step.scheduled:
                sequence, before = item.sequence, item.sequence.num_cached
                sequence.num_cached = item.start + item.num_tokens
                if self._keys is not None and sequence.num_cached % self.page_size == 0:
                    self._publish(self._keys, sequence)
                sequence.num_cached = before
            return found

    class Wrong(PagedCache):
        name = "early"

        def bind(self, context: Any) -> Any:
            monkeypatch.setattr("jackfield_plugins.cache.paged.PagedKVCache", Early, raising=False)
            monkeypatch.setattr(store, "PagedKVCache", Early)
            return super().bind(context)

    known = registry().backends["cache"]
    mine = Registered(Wrong(), "stranger", "1.0", "ep")
    monkeypatch.setitem(registry().backends, "cache", [*known, mine])
    found = overlapping(tmp_path, "early?page_size=4")
    assert found.outcome == "failed"
    assert "before the last tokens are read" in found.message or "never given" in found.message

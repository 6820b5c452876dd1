"""Which tokens of images see one another, and that steps feed them whole."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.bridge.image_encoder import Features
from jackfield.bridge.image_steps import Row, Shown, blocks_of
from jackfield.engine import step_images
from jackfield.engine.batch_limits import BatchLimits
from jackfield.engine.prompt_images import PromptImages
from jackfield.engine.step_images import KeptFeatures, whole_blocks
from jackfield.errors import ExecutionError


def shown(blocks: list[tuple[int, int]]) -> Shown:
    return Shown([at for begin, end in blocks for at in range(begin, end)])


def drawn_blocks(chance: random.Random) -> list[tuple[int, int]]:
    found, at = [], 0
    for _ in range(chance.randint(1, 4)):
        at += chance.randint(1, 5)
        found.append((at, at := at + chance.randint(1, 9)))
    return found


def test_places_that_cut_no_image() -> None:
    """Against all places, one by one."""
    chance = random.Random(0)
    tried = 0
    for _ in range(60):
        blocks = drawn_blocks(chance)
        one, length = shown(blocks), blocks[-1][1] + 4
        assert list(one.blocks) == blocks
        uncut = [at for at in range(length) if not any(b < at < e for b, e in blocks)]
        for begin, end in itertools.combinations(range(length), 2):
            due = max((at for at in uncut if begin <= at <= end), default=begin)
            assert one.whole(begin, end) == due
            own = [block for block in blocks if block[0] <= begin < block[1]]
            assert one.behind(begin) == (own[0][1] if own else begin + 1)
            inside = [(b, e) for b, e in blocks if b < end and e > begin]
            assert list(one.blocks_in(begin, end)) == inside
            tried += 1
    assert tried > 10_000


def test_images_side_by_side_are_one_block_and_part_pages() -> None:
    """What is kept of the first one depends on the second, so it is not that of the first alone."""
    assert list(shown([(2, 5), (5, 9), (11, 12)]).blocks) == [(2, 9), (11, 12)]
    apart, beside = (PromptImages((), shown=shown(b)) for b in ([(2, 5), (6, 9)], [(2, 5), (5, 8)]))
    moved = PromptImages((), shown=shown([(1, 4), (8, 11)]))
    assert apart.salt == moved.salt != beside.salt


def test_what_queries_see_on_to() -> None:
    """Three in a step: one found to within its first image, one without, one that decodes."""
    one = shown([(2, 6), (8, 10)])
    rows = [Row([0] * 8, 4, one, 0), Row([0] * 3, 0, None, 1), Row([0], 10, one, 2)]
    found = blocks_of(rows, torch.device("cpu"))
    assert found is not None
    assert found.ends.dtype is torch.int32
    assert found.ends.tolist() == [6, 6, 7, 8, 10, 10, 11, 12, 1, 2, 3, 11]
    assert list(map(list, found.of)) == [[(2, 6), (8, 10)], [], []]
    assert blocks_of(rows[1:], torch.device("cpu")) is None
    with pytest.raises(ExecutionError, match="a step cuts the tokens of an image at 9"):
        blocks_of([Row([0] * 9, 0, one, 0)], torch.device("cpu"))


class Reading:
    """A sequence that has read so much of its prompt."""

    def __init__(self, cached: int, blocks: list[tuple[int, int]] | None) -> None:
        self.num_cached = cached
        self.images = None if blocks is None else PromptImages((), shown=shown(blocks))


def test_a_step_feeds_whole_images_and_somebody() -> None:
    """Whatever a scheduler says, within what a step may have."""
    chance = random.Random(1)
    longer = 0
    for _ in range(3000):
        running: list[Any] = []
        for _ in range(chance.randint(1, 5)):
            blocks = drawn_blocks(chance) if chance.random() < 0.7 else None
            uncut = [0, *(at for block in blocks or () for at in block)]
            running.append(Reading(chance.choice(uncut), blocks))
        said = [chance.choice((0, 1, 3, 8)) for _ in running]
        most = max(9, sum(said))  # as many as an image has
        found = whole_blocks(running, said, most)
        assert 0 <= sum(found) <= most
        assert any(found) == any(said)
        for one, asked, count in zip(running, said, found, strict=True):
            end = one.num_cached + count
            blocks = () if one.images is None else one.images.shown.blocks
            assert not any(begin < end < behind for begin, behind in blocks)
            assert asked or not count
            longer += count > asked
    assert longer > 500


def test_how_long_an_image_may_be() -> None:
    limits = BatchLimits(max_batch_size=4, max_batch_tokens=64, prefill_chunk_size=32)
    assert limits.cuts(32) is None
    assert "prefill_chunk_size is 32" in str(limits.cuts(33))
    assert "max_batch_tokens is 64" in str(replace(limits, prefill_chunk_size=None).cuts(65))


def test_features_that_were_used_last_are_kept_up_to_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_images, "KEPT_BYTES", 100)
    kept = KeptFeatures()
    for name in (b"a", b"b"):
        kept.keep(name, Features(torch.zeros(10)))
    assert kept.find(b"a") is not None
    kept.keep(b"c", Features(torch.zeros(10)))
    assert [name for name in (b"a", b"b", b"c") if kept.find(name) is not None] == [b"a", b"c"]
    assert kept.num_bytes == 80
    kept.keep(b"large", Features(torch.zeros(26)))
    assert not any(map(kept.find, (b"a", b"c", b"large")))
    assert kept.num_bytes == 0

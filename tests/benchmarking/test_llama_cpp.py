"""llama.cpp as a rival: what it is fed, whose place is taken, and what it cannot run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jackfield.benchmarking.contenders import product, rival
from jackfield.benchmarking.llama_cpp import LlamaCpp
from jackfield.benchmarking.preparing import reader
from jackfield.benchmarking.running import bench
from jackfield.benchmarking.workload import Request, Shape, preset
from jackfield.demo import MODEL_PATH
from jackfield.errors import UsageError

WORDS = 97


def following(tokens: list[int]) -> int:
    """What the library below says comes next: it depends on every token and its place."""
    return sum(at * token for at, token in enumerate(tokens, 1)) % WORDS


class Library:
    """The functions of llama_cpp that are called, on sequences that are lists."""

    def __init__(self) -> None:
        self.cached: dict[int, list[int]] = {}
        self.calls: list[int] = []
        self.together = 0
        self._logits: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_default_params"):
            return SimpleNamespace
        raise AttributeError(name)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> object:
        assert path.endswith(b".gguf")
        assert params.n_gpu_layers == 0
        return self

    def llama_init_from_model(self, model: object, params: Any) -> object:
        self.slots, self.room = params.n_seq_max, params.n_ctx
        return self

    def llama_model_get_vocab(self, model: object) -> object:
        return self

    def llama_vocab_n_tokens(self, vocab: object) -> int:
        return WORDS

    def llama_model_size(self, model: object) -> int:
        return 5

    def llama_get_memory(self, context: object) -> object:
        return self

    def llama_memory_clear(self, memory: object, data: bool) -> None:
        self.cached.clear()

    def llama_memory_seq_rm(self, memory: object, slot: int, start: int, end: int) -> None:
        assert (start, end) == (-1, -1)
        del self.cached[slot]

    def llama_batch_init(self, tokens: int, embeddings: int, most: int) -> Any:
        return SimpleNamespace(
            n_tokens=0, size=tokens, token=[0] * tokens, pos=[0] * tokens, logits=[False] * tokens,
            n_seq_id=[0] * tokens, seq_id=[[0] for _ in range(tokens)],
        )  # fmt: skip

    def llama_batch_free(self, batch: Any) -> None:
        batch.size = 0

    def llama_decode(self, context: object, batch: Any) -> int:
        assert 0 < batch.n_tokens <= batch.size
        self.calls.append(batch.n_tokens)
        self._logits.clear()
        for at in range(batch.n_tokens):
            assert batch.n_seq_id[at] == 1
            slot = batch.seq_id[at][0]
            assert slot < self.slots
            own = self.cached.setdefault(slot, [])
            assert batch.pos[at] == len(own)
            own.append(batch.token[at])
            if batch.logits[at]:
                row = np.zeros(WORDS, np.float32)
                row[following(own)] = 1
                self._logits[at] = np.ctypeslib.as_ctypes(row)
        self.together = max(self.together, len(self.cached))
        assert sum(map(len, self.cached.values())) <= self.room
        return 0

    def llama_get_logits_ith(self, context: object, at: int) -> Any:
        return self._logits[at]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="needs jackfield[gguf]")
    from gguf_files import Type, export
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    return export(model, path, Type.Q8_0, tokenizer)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("rate", [0.0, 0.002])
@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.long
def test_each_text_is_that_of_its_request_alone(
    batch: int, rate: float, file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jackfield.benchmarking.llama_cpp.MOST_TOKENS", 8)  # so prompts are cut
    requests = [
        Request(tuple(range(3, 4 + 5 * at)), new, at * rate)
        for at, new in enumerate([4, 1, 7, 2, 5])
    ]
    program = LlamaCpp({"model": str(file), "batch": batch}, requests)
    program.load()
    for number in range(2):
        ran = program.round(requests, number)
        for request, answer in zip(requests, ran.tokens, strict=True):
            text, new = list(request.prompt), []
            for _ in range(request.new_tokens):
                new.append(following(text))
                text.append(new[-1])
            assert answer == new
        assert library.cached == {}
        assert max(library.calls) <= 8
        assert library.together <= batch
        for first, ended in zip(ran.first, ran.ended, strict=True):
            assert first is not None
            assert 0 < first <= ended <= ran.seconds
    if not rate:
        assert library.together == min(batch, 3)  # more find no room in a call of 8
    assert program.about()["weight_bytes"] == 5


def test_what_it_cannot_run_is_refused(
    file: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"reads GGUF files; measure one with -m FILE\.gguf"):
        LlamaCpp({"model": "demo", "batch": 1}, [])
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UsageError, match=r"is not here .* pip install llama-cpp-python"):
        LlamaCpp({"model": str(file), "batch": 1}, [])


def test_the_library_itself_beside_ours(file: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    common = {"model": str(file)}
    rows = [*product({}, common), rival("llama.cpp", common)]
    shape = Shape(requests=5, prompt_tokens=40, new_tokens=12, batch=3)
    found = bench(rows, preset("chat", shape, *reader(rows[0])), rounds=3)
    assert [row.reasons for row in found.rows] == [(), ()]
    assert found.rows[1].parity is not None
    assert found.rows[1].parity["lossy"] in (True, False)

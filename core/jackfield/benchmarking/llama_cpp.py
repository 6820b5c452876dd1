"""llama.cpp on a GGUF file, by its C functions, as its own example of parallel decoding does it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jackfield.benchmarking.programs import Program, Ran
from jackfield.benchmarking.workload import Request
from jackfield.errors import ExecutionError, UsageError

#: Tokens that it takes in one call, by its own default.
MOST_TOKENS = 2048


@dataclass(eq=False)
class _Running:
    """A request in a slot. `fed` of its tokens, prompt and answer, are in the cache."""

    number: int
    request: Request
    slot: int
    fed: int = 0
    answer: list[int] = field(default_factory=list)
    first: float = 0.0  # seconds from its arrival, as `ended`
    ended: float = 0.0

    @property
    def left(self) -> Sequence[int]:
        """Tokens that are not in the cache."""
        prompt = self.request.prompt
        return prompt[self.fed :] or self.answer[self.fed - len(prompt) :]

    def take(self, token: int, now: float) -> None:
        self.answer.append(token)
        self.ended = now - self.request.arrival
        if len(self.answer) == 1:
            self.first = self.ended


class LlamaCpp(Program):
    """Up to `batch` sequences decode together; who ends makes room for the next.

    Prompts are read beside those that decode. Everything else is llama.cpp's default: keys and
    values are float16, and activations have 8 bits where weights are quantized.
    """

    def __init__(self, arguments: dict[str, Any], requests: Sequence[Request]) -> None:
        self.batch: int = arguments.pop("batch")
        super().__init__(arguments, requests)
        from jackfield.api import prepare

        ready = prepare(**arguments, compile="none")
        if ready.job.source.gguf is None:
            raise UsageError(
                "llama.cpp reads GGUF files; measure one with -m FILE.gguf, or drop this rival"
            )
        self._path = str(ready.job.source.location)
        self.devices = (ready.plan.device or "cpu",)
        self._lib = _library()
        self._gpu = self.devices[0] != "cpu"
        if self._gpu and not self._lib.llama_supports_gpu_offload():
            raise UsageError(
                f"this llama.cpp was built for the CPU, and the model runs on {self.devices[0]}; "
                "measure with --device cpu, or drop this rival"
            )
        self._context: Any = None  # until it is loaded
        self._size = self._weight_bytes = 0

    def load(self) -> None:
        import torch

        lib = self._lib
        of_model = lib.llama_model_default_params()
        of_model.n_gpu_layers = 999 if self._gpu else 0
        model = lib.llama_model_load_from_file(self._path.encode(), of_model)
        if not model:
            raise ExecutionError(f"llama.cpp cannot read {self._path}")
        longest = max(len(one.prompt) + one.new_tokens for one in self.requests)
        params = lib.llama_context_default_params()
        params.n_seq_max = self.batch
        params.n_ctx = longest * self.batch
        params.kv_unified = True  # else a sequence may have only its share
        params.n_batch = MOST_TOKENS
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise ExecutionError(f"llama.cpp has no room for {self.batch} requests of {longest}")
        self._size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._weight_bytes = lib.llama_model_size(model)

    def about(self) -> dict[str, Any]:
        plan = {"dtype": "float32", "device": self.devices[0], "rounds": True}
        return {"plan": plan, "weight_bytes": self._weight_bytes}

    def round(self, requests: Sequence[Request], number: int) -> Ran:
        del number  # nothing is kept
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, True)
        waiting, free = deque(enumerate(requests)), deque(range(self.batch))
        running: list[_Running] = []
        done: list[_Running] = []
        began = time.perf_counter()
        while len(done) < len(requests):
            now = time.perf_counter() - began
            while waiting and free and waiting[0][1].arrival <= now:
                running.append(_Running(*waiting.popleft(), free.popleft()))
            if not running:
                time.sleep(max(0.0, waiting[0][1].arrival - now))
                continue
            told = self._step(running)
            now = time.perf_counter() - began
            for one, token in told:
                one.take(token, now)
                if len(one.answer) == one.request.new_tokens:
                    running.remove(one)
                    done.append(one)
                    self._lib.llama_memory_seq_rm(memory, one.slot, -1, -1)
                    free.append(one.slot)
        seconds = time.perf_counter() - began
        done.sort(key=lambda one: one.number)
        return Ran(
            seconds,
            [one.first for one in done],
            [one.ended for one in done],
            [one.answer for one in done],
        )

    def _step(self, running: Sequence[_Running]) -> list[tuple[_Running, int]]:
        """One call: what is to be fed, those that decode first; the tokens that it chooses."""
        room = MOST_TOKENS
        ends: list[tuple[_Running, int]] = []
        with _batch(self._lib, room) as batch:
            for one in sorted(running, key=lambda one: not one.answer):
                fed = one.left[:room]
                for token in fed:
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at] = token, one.fed
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, one.slot
                    batch.logits[at] = False
                    batch.n_tokens, one.fed = at + 1, one.fed + 1
                room -= len(fed)
                if fed and not one.left:
                    batch.logits[batch.n_tokens - 1] = True
                    ends.append((one, batch.n_tokens - 1))
            if failed := self._lib.llama_decode(self._context, batch):
                raise ExecutionError(f"llama.cpp's decode ended with {failed}")
            return [(one, int(self._logits(at).argmax())) for one, at in ends]

    def _logits(self, at: int) -> Any:
        import numpy as np

        found = self._lib.llama_get_logits_ith(self._context, at)
        return np.ctypeslib.as_array(found, shape=(self._size,))


@contextlib.contextmanager
def _batch(lib: Any, tokens: int) -> Iterator[Any]:
    batch = lib.llama_batch_init(tokens, 0, 1)
    try:
        yield batch
    finally:
        lib.llama_batch_free(batch)


def _library() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise UsageError(
            f"llama.cpp is not here ({error}); pip install llama-cpp-python, or drop this rival"
        ) from None
    return llama_cpp

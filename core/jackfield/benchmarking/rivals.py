"""Other programs on the same weights, driven as their own documentation does it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jackfield.benchmarking.llama_cpp import LlamaCpp
from jackfield.benchmarking.programs import Program, Ran
from jackfield.benchmarking.workload import Request
from jackfield.errors import ExecutionError, UsageError

if TYPE_CHECKING:
    import torch

#: An id that no token has: greedy texts go on to the length that was asked for.
NEVER = -1
#: Tokens of a page of transformers' own paged cache.
PAGE = 256


class Transformers(Program):
    """A model as transformers loads it, with sdpa."""

    def __init__(self, arguments: dict[str, Any], requests: Sequence[Request]) -> None:
        self.batch: int = arguments.pop("batch")
        super().__init__(arguments, requests)
        from jackfield.api import prepare

        ready = prepare(**arguments, quantization="none", compile="none")
        if ready.job.source.gguf is not None or ready.plan.requirements.stored is not None:
            raise UsageError(
                "transformers itself is measured on weights that are not quantized; give such a "
                "model, or drop this rival"
            )
        self._source, self._needs = ready.job.source, ready.plan.requirements
        self.devices = (ready.plan.device or "cpu",)
        self.model: Any = None  # until it is loaded

    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            str(self._source.location),
            revision=self._source.revision,
            dtype=getattr(torch, self._needs.dtype),
            attn_implementation="sdpa",
        )
        self.model = model.eval().to(self.devices[0])

    def about(self) -> dict[str, Any]:
        size = sum(parameter.nbytes for parameter in self.model.parameters())
        plan = {"dtype": self._needs.dtype, "device": self.devices[0]}
        return {"plan": plan, "weight_bytes": size}


class Generate(Transformers):
    """One padded `generate` after another, each row as long as the longest of its batch."""

    def __init__(self, arguments: dict[str, Any], requests: Sequence[Request]) -> None:
        super().__init__(arguments, requests)
        if any(one.arrival for one in requests):
            raise UsageError(
                "generate takes all requests at once, and these arrive one after the other; drop "
                "the rate, or this rival"
            )

    def round(self, requests: Sequence[Request], number: int) -> Ran:
        from transformers import StoppingCriteriaList

        del number  # nothing is kept
        began, tokens = time.perf_counter(), []
        first: list[float | None] = []
        ended: list[float] = []
        for at in range(0, len(requests), self.batch):
            batch = requests[at : at + self.batch]
            clock = _Clock(began)
            ids, mask = self._padded([one.prompt for one in batch])
            found = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(one.new_tokens for one in batch),
                do_sample=False,
                eos_token_id=NEVER,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
            for row, one in zip(found.tolist(), batch, strict=True):
                tokens.append(row[ids.shape[1] :][: one.new_tokens])
                first.append(clock.times[0])
                ended.append(clock.times[one.new_tokens - 1])
        return Ran(time.perf_counter() - began, first, ended, tokens)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        width = max(map(len, prompts))
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _Clock:
    """A stopping criterion that stops nothing: the seconds since `began` at which tokens came."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        import torch

        self.times.append(time.perf_counter() - self.began)
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


class GenerateBatch(Transformers):
    """transformers' continuous batching, through its manager, since lengths differ."""

    def round(self, requests: Sequence[Request], number: int) -> Ran:
        del number
        ended: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        with self._manager(requests) as manager:
            began = time.perf_counter()
            names = []
            for one in requests:
                time.sleep(max(0.0, began + one.arrival - time.perf_counter()))
                given = list(one.prompt)
                names.append(manager.add_request(given, max_new_tokens=one.new_tokens))
            while len(tokens) < len(names):
                found = manager.get_result(timeout=1)
                if found is None and not manager.is_running():
                    raise ExecutionError("its manager has ended before its requests")
                if found is not None and found.is_finished():
                    ended[found.request_id] = time.perf_counter() - began
                    tokens[found.request_id] = list(found.generated_tokens)
            seconds = time.perf_counter() - began
        # It hands out a text at its end, and does not say when its first token came.
        late = [ended[name] - one.arrival for name, one in zip(names, requests, strict=True)]
        return Ran(seconds, [None] * len(names), late, [tokens[name] for name in names])

    @contextlib.contextmanager
    def _manager(self, requests: Sequence[Request]) -> Iterator[Any]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        longest = max(one.new_tokens for one in requests)
        settings = GenerationConfig(
            max_new_tokens=longest, do_sample=False, eos_token_id=NEVER, pad_token_id=0
        )
        pages = sum(-(-(len(one.prompt) + one.new_tokens) // PAGE) for one in requests)
        tokens = max(2048, *(len(one.prompt) for one in requests))
        # The first is called block_size in transformers 5.17, and page_size later.
        batching = ContinuousBatchingConfig(PAGE, num_blocks=pages + 1, max_batch_tokens=tokens)
        with self.model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=batching
        ) as manager:
            yield manager
        self.model.set_attn_implementation("sdpa")


RIVAL_PROGRAMS: dict[str, type[Program]] = {
    "generate": Generate, "generate_batch": GenerateBatch, "llama.cpp": LlamaCpp,
}  # fmt: skip

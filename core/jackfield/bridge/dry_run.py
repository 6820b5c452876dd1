"""What a step takes and reads, seen on empty tensors: the model runs on torch's meta device.

Every operation of torch passes by while it does. The sizes of the tensors that are alive at one
time are its activations; the parameters that operations are handed are what it reads.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import DynamicCache, PreTrainedConfig

from jackfield.bridge.config_files import config_tree
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.prompt_flops import PromptFlops
from jackfield.bridge.quiet import quiet
from jackfield.bridge.sharding import Shard
from jackfield.bridge.shared_models import part_of
from jackfield.bridge.stand_ins import standing_in
from jackfield.bridge.step_reads import ExpertWeights, StepReads, Table
from jackfield.contracts.compiling import TRACING
from jackfield.contracts.requirements import BYTES, Requirements
from jackfield.contracts.sizes import kv_bytes
from jackfield.errors import first_line

logger = logging.getLogger("jackfield")

#: Operations that read single rows of a parameter.
_ROWS = (torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.index_select)


def _key(tensor: torch.Tensor) -> int:
    """Where its numbers would be: the same for all views of them."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _Watch(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and notes which parameters are read.

    `standing` are the storages that were there before. `rows` is how many numbers were looked up
    in a parameter, `whole` the parameters that an operation took as a whole. `flops` is what
    products of matrices take, without `attentions` (`PromptFlops`).
    """

    def __init__(self, standing: dict[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._standing = standing
        self._alive: dict[int, int] = {}
        self.live = self.peak = 0
        self.rows: dict[int, int] = {}
        self.whole: set[int] = set()
        self.flops = 0
        self.attentions: list[tuple[int, int | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        results = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for storage in results:
            self._born(storage)
        made = {storage._cdata for storage in results}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._read(func, tensor, made, out)
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._standing or key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._alive.pop(key, 0)

    def _read(self, func: Any, tensor: torch.Tensor, made: set[int], out: Any) -> None:
        key = _key(tensor)
        if key not in self._standing or key in made:  # a view of a parameter reads nothing
            return
        if func.overloadpacket in _ROWS and isinstance(out, torch.Tensor):
            self.rows[key] = self.rows.get(key, 0) + out.numel()
        else:
            self.whole.add(key)


class DryRun:
    """Steps of the model of `config` as `needs` describes it, without weights and without memory.

    `materializes_scores`: its attention makes the whole matrix of scores. In the packed layout keys
    and values are written to where they stay; otherwise a layer's are put together anew in each
    step, as transformers' dynamic cache does it. Scratch memory of kernels is not seen.
    """

    def __init__(self, config: PreTrainedConfig, needs: Requirements, *, materializes_scores: bool):
        config = copy.deepcopy(config)
        for part in config_tree(config):
            part.dtype = getattr(torch, needs.dtype)
        self._needs = needs
        self._scores = materializes_scores
        whole = needs.tp_size == 1  # otherwise as one of the processes has it
        shard = Shard(needs.tp_size, 0, needs.expert_parallel)
        made = meta_model(config) if whole else part_of(config, shard)
        #: among how many processes experts are handed out, each of which has as many
        self._holders = needs.tp_size if needs.expert_parallel else 1
        self._model = made.eval()
        self._keeps = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        standing = (*self._model.parameters(), *self._model.buffers())
        self._standing = {_key(tensor): tensor for tensor in standing}
        self._experts: dict[int, tuple[torch.nn.Module, int]] = {}
        self._watch = _Watch(self._standing)  # of the run that is under way
        self._broken = False

    def activations(self, tokens: int, context: int, rows: int = 1) -> int | None:
        """The most bytes that a step takes beside weights and cache; None where it is unknown.

        Each of `rows` sequences feeds `tokens` tokens, with which it has `context`. The logits of
        each one's last token are among them.
        """
        watch = self._run(tokens, context, rows)
        if watch is None:
            return None
        if self._packed:
            return watch.peak + rows * self._beyond_windows(tokens, context)
        held = kv_bytes(self._needs, context) if self._needs.kv_numbers else 0
        return max(0, watch.peak - rows * held)

    def _beyond_windows(self, tokens: int, context: int) -> int:
        """What layers with a window store of a step's tokens until the step is over."""
        r = self._needs
        numbers = sum(
            count * (min(context, window + tokens) - min(context, window))
            for count, window in zip(r.packed_numbers, r.windows, strict=False)
            if window is not None
        )
        return numbers * BYTES[r.dtype]

    def reads(self) -> StepReads | None:
        """Which weights a step that decodes touches; None where it is unknown."""
        self._experts.clear()
        watch = self._run(1, 2, 1)
        if watch is None:
            return None
        experts, known = [], set(watch.whole)
        for module, active in self._experts.values():
            own = list(module.parameters())
            known.update(map(_key, own))
            count = self._holders * next(p.shape[0] for p in own if p.dim() > 1)
            experts.append(ExpertWeights(sum(p.nbytes for p in own), count, active))
        tables, idle = [], 0
        for parameter in self._model.parameters():
            if (key := _key(parameter)) in watch.rows and key not in known:
                looked_up = watch.rows[key] * parameter.element_size()
                tables.append(Table(parameter.nbytes, looked_up))
            elif key not in known:
                idle += parameter.nbytes
        return StepReads(tuple(tables), tuple(experts), idle)

    def prompt_flops(self) -> PromptFlops | None:
        """What it takes to read a prompt; None where it is unknown."""
        if self._own_attention:
            return None
        one, two = self._run(1, 1, 1), self._run(2, 2, 1)
        if one is None or two is None:
            return None
        token = two.flops - one.flops
        return PromptFlops(token, one.flops - token, tuple(one.attentions))

    @property
    def _own_attention(self) -> bool:
        """Whether the model has attention of its own, which is not stood in for."""
        return "own_attention" in self._needs.features

    @property
    def _packed(self) -> bool:
        return self._needs.layout == "packed"

    def _run(self, tokens: int, context: int, rows: int) -> _Watch | None:
        """The last `tokens` of `context`, watched, after all others have been fed."""
        if self._broken:
            return None
        watch = self._watch = _Watch(self._standing)
        try:
            with (
                quiet(),
                TRACING,
                torch.no_grad(),
                torch.device("meta"),
                self._stand_ins(context),
                watch,
            ):
                cache = None if self._packed else DynamicCache(config=self._model.config)
                if cache is not None and context > tokens:
                    self._forward(context - tokens, rows, cache)
                    watch.peak = watch.live
                watch.rows.clear()
                watch.whole.clear()
                watch.flops = 0
                watch.attentions.clear()
                logits = self._forward(tokens, rows, cache)
                torch.log_softmax(logits.float(), -1)  # as a sampler does
        except Exception as error:  # noqa: BLE001 - any model's code
            logger.debug("no dry run of %s: %s", self._needs.architecture, first_line(error))
            self._broken = True
            return None
        return watch

    def _forward(self, tokens: int, rows: int, cache: Any) -> torch.Tensor:
        """The logits of each row's last token. Without positions: models read numbers off them."""
        keep = {"logits_to_keep": 1} if self._keeps else {}
        out = self._model(
            input_ids=torch.zeros(rows, tokens, dtype=torch.long),
            past_key_values=cache,
            use_cache=cache is not None,
            **keep,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _stand_ins(self, context: int) -> contextlib.AbstractContextManager[None]:
        """Have attention and experts leave what they would leave in memory."""
        return standing_in(
            self._model,
            attention=None if self._own_attention else self._attention(context),
            experts=self._run_experts,
            # In the packed layout transformers looks for no mask where it can make none.
            mask=None if self._packed else lambda *args, **kwargs: None,
        )

    def _attention(self, context: int) -> Callable[..., Any]:
        def attention(
            module: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any, **more: Any
        ) -> tuple[torch.Tensor, None]:
            for extra in more.values():
                if isinstance(extra, torch.Tensor):  # sinks, biases: read as a whole
                    extra.clone()
            rows, heads, length, size = query.shape
            each = 2 * heads * (size + value.shape[-1])
            self._watch.attentions.append((each, more.get("sliding_window")))
            out = query.new_empty(rows, length, heads, value.shape[-1])
            if self._scores:
                columns = context if self._packed else key.shape[2]
                _softmax_of(query, key, value, columns)
            return out, None

        return attention

    def _run_experts(
        self, module: Any, hidden: torch.Tensor, index: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        """A grouped product: each token once for each of its experts, layer after layer."""
        active = index.shape[-1]
        self._experts[id(module)] = (module, active)
        taken = hidden.reshape(-1, hidden.shape[-1]).repeat_interleave(active, 0)
        for parameter in module.parameters():
            if parameter.dim() == 3:
                self._watch.flops += 2 * len(taken) * parameter[0].numel() // self._holders
                width = parameter.numel() // parameter.shape[0] // hidden.shape[-1]
                made = taken.new_empty(len(taken), width)
                taken.new_empty(len(taken), width)  # gate times up, or what is weighted and added
                del made
        return torch.empty_like(hidden)


def _softmax_of(query: torch.Tensor, key: Any, value: torch.Tensor, columns: int) -> None:
    """What eager attention makes: keys and values of every head, scores, and these in float32."""
    rows, heads, length, size = query.shape
    keys = query.new_empty(rows, heads, columns, size)
    values = query.new_empty(rows, heads, columns, value.shape[-1])
    scores = query.new_empty(rows, heads, length, columns)
    scores = scores + query.new_empty(1, 1, length, columns)  # its mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    del keys, values, weights

"""A cache that is bound to a model: what the loop calls in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jackfield.contracts.model_inputs import CacheUsage, FixedStep, ModelInputs
from jackfield.contracts.native import NativeCall
from jackfield.contracts.packed import PackedLayer
from jackfield.contracts.sequences import Sequence, Step

if TYPE_CHECKING:
    import torch
    import transformers


class KVCache(ABC):
    """The keys and values of the running sequences, bound to one model.

    A sequence enters with `admit`. Then, in every step: `adjust_schedule` and `fits`, both again
    where the step does not fit; `prepare`, the model's forward call, `commit`. Between two steps:
    `fork`, `preempt`, `release`; `preempt` also where a step does not fit. All of it runs in the
    loop's thread; `refuse` and `usage` may be asked in others meanwhile. A step that fails ends
    without `commit`; all sequences are then released.

    Changes: `num_cached` of sequences, as each method says. All else of a sequence is for reading.

    Violations: what a method returns, and `num_cached` after it, is checked in every step. What
    is wrong is a PluginError that names the cache and ends every open request. In caches that are
    not jackfield's own, sequences that were changed and the numbers in `input_ids` and
    `position_ids` are looked at too. Keys and values of the padded layout are not: wrong ones are
    a wrong text.

    Attributes:
        continuous: Whether a sequence may enter, or skip a step, at any time: continuous batching.
            Otherwise they enter together, and each takes part in every step until it is released.
    """

    continuous: ClassVar[bool] = False

    @abstractmethod
    def admit(self, sequence: Sequence) -> bool:
        """Take in a sequence, if what it has so far fits beside the others.

        Called for the next in line, before a step; again later where it said no, and where the
        sequence was preempted. Its `tokens` are then the prompt and what it had generated.

        Changes: sets `num_cached` to how many of its tokens, from the first on, are there already:
        0 to `len(tokens) - 1` where the cache is `continuous`, for the last token is always fed;
        else 0.

        Violations: PluginError for another number, for a no while nothing else is held, and, in
        the packed layout, for tokens that no sequence with the same `cache_salt` has fed. Where
            layers have states ("linear_attention") a sequence gets a new salt whenever it enters,
            so the number is 0 then, also after `preempt`: its state is gone.

        Args:
            sequence: One that the cache does not hold.

        Returns:
            Whether it is in.
        """

    @abstractmethod
    def prepare(self, step: Step) -> ModelInputs:
        """Lay out the tokens of `step` for one forward call that stores their keys and values.

        The padded layout is batch × time. The width is that of the sequence with most tokens in
        this step, and rows are aligned at the right: the last columns of a row are these tokens,
        those before them are padding. Rows keep their order from step to step. `kwargs` are

        - `input_ids`: int64 `[rows, width]`, with any token id as padding;
        - `position_ids`: int64 `[rows, width]`. A token's position is its place in its sequence,
          `start` and up, whatever its column;
        - `attention_mask`: int64 `[rows, columns]` with 1 for every valid column, those of the
          steps before and this one; None where all are valid;
        - `past_key_values`: the transformers cache, which the model updates; `use_cache` True;
        - `logits_to_keep`: int, 1 + the most drafts of a sequence.

        The packed layout has the tokens of all sequences in one row, one after the other, and no
        padding. `kwargs` are

        - `input_ids`: int64 `[1, tokens]`;
        - `position_ids`: int64 `[1, tokens]`, each token's place in its sequence;
        - `use_cache`: False, since `PackedKVCache.write` is the cache; no mask;
        - `logits_to_keep`: which of the tokens: equally many of each sequence, in the order of
          `step.scheduled`, ending with its last token; at least 1 + its drafts where `samples`.
          int64 `[scheduled * k]`, or an int where these are the last tokens of the step. `rows` is
          the number of sequences.

        Called once a step, after `fits` said yes to the same step.

        Violations: PluginError for wrong types, shapes, `rows` or `decode`. In caches that are
        not jackfield's own, also for other tokens or positions (on a GPU in some steps only), for
        too few logits, and for an `update` of `past_key_values` that returns fewer tokens, other
        rows or another dtype than were stored.

        Args:
            step: Which sequences, each of them admitted, feed how many tokens; `start` is a
                sequence's `num_cached`. In a cache with `continuous = False` every row is
                scheduled, with 0 tokens where it waits.

        Returns:
            The inputs; valid until the next `prepare`.

        Raises:
            CacheFullError: There is no room after all; it ends every open request.
        """

    @abstractmethod
    def commit(self, step: Step, kept: Seq[int]) -> None:
        """Keep the first `kept[i]` tokens of `step.scheduled[i]`, take back the rest.

        Called once, after the forward call. `sequence.tokens` does not have the accepted drafts
        yet: they are appended afterwards.

        Changes: sets `num_cached` of every sequence in `step` to its `start + kept[i]`; anything
        else is a PluginError.

        Args:
            step: The step that was prepared.
            kept: One number each, from `num_tokens` to `num_tokens + len(drafts)`. Less than that
                only where the backend declares `rollback`.
        """

    @abstractmethod
    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget these sequences and give their memory back.

        Called when they end, also after a step that failed between `prepare` and `commit`.

        Args:
            sequences: Running, preempted, or never admitted; unknown ones are ignored.
        """

    def fits(self, step: Step) -> bool:
        """Whether there is memory for `step`; it takes none yet.

        Where there is not, the loop asks again without drafts, then with one request less: it
        preempts the youngest of the lowest priority. Where one request is left, it ends all with a
        CacheFullError.

        Args:
            step: As for `prepare`.

        Returns:
            By default True.
        """
        del step
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Give a running sequence's memory back for now; `admit` is called again later.

        Changes: sets `num_cached` to 0; anything else is a PluginError.

        Args:
            sequence: One that was admitted. By default it is released.
        """
        self.release([sequence])
        sequence.num_cached = 0

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """Take back all but the first `tokens` cached tokens, in whatever steps they were fed.

        Called between steps, where the cache belongs to a draft model, and only there.

        Changes: sets `num_cached` to `tokens`, or to 0 where it forgets the whole sequence, as it
        does by default; anything else is a PluginError.

        Args:
            sequence: One that was admitted.
            tokens: From 0 to less than `num_cached`.
        """
        del tokens
        self.preempt(sequence)

    def fork(self, copies: Seq[tuple[Sequence, Sequence]], dropped: Seq[Sequence]) -> None:
        """Forget `dropped`; then the second of each pair begins with what is cached of the first.

        Called after `commit`, where the backend declares `forks`. A fork has no room to ask for:
        copies share what is cached, and what they need of their own is found in the next step, to
        which `fits` may say no. In a cache with `continuous = False`, rows that stay keep their
        order, and the new ones come behind them in the order of `copies`.

        Changes: sets `num_cached` of each second to that of its first; anything else is a
        PluginError.

        Args:
            copies: Pairs (goes on, its copy). The copy holds nothing: it is new, or in `dropped`.
            dropped: Sequences that no beam continues; none of them is a first.

        Raises:
            NotImplementedError: By default.
        """
        raise NotImplementedError(f"{type(self).__name__} does not fork")

    def refuse(self, prompt_length: int, max_new_tokens: int, copies: int = 1) -> str | None:
        """Why a request of this size can never fit, and which option would help; None: it can.

        Asked when a request is made, in the thread that makes it, while steps may run. The last new
        token is not fed, so `prompt_length + max_new_tokens - 1` tokens are cached, of each copy.

        Args:
            prompt_length: In tokens.
            max_new_tokens: In tokens.
            copies: How many sequences of this size run at once: beams, where the backend declares
                `forks`, or 2 with guidance. They may have no prompt in common.

        Returns:
            One line; the request then ends with a CacheFullError that says it. By default None.
        """
        del prompt_length, max_new_tokens, copies
        return None

    def adjust_schedule(self, sequences: Seq[Sequence], wanted: list[int]) -> list[int]:
        """How many tokens each of the running sequences feeds in this step.

        For a cache whose rows move together: it evens out what the scheduler wants. A packed cache
        with `continuous = True` returns `wanted`, as it does by default, or less where a pool is
        smaller, but at least 1 of each; a padded one may have some wait.

        Violations: PluginError for anything but whole numbers in these bounds, not all 0.

        Args:
            sequences: All that run, in the order of the loop. Where the tokens of an image see one
                another, some may feed less than is returned, and one all of an image, up to
                `BindContext.max_chunk_size`.
            wanted: One number each, from the scheduler; 0: it waits.

        Returns:
            One number each, at most `max(wanted)` and at most what is not cached of it.
        """
        del sequences
        return wanted

    def held_bytes(self) -> int | None:
        """The memory of the keys and values of running sequences, as it is allocated, in bytes.

        Pages count whole; pages without a holder do not. None: unknown.
        """
        return None

    def forget(self) -> None:
        """Drop what is kept of sequences that have left, and the padding that `fix` laid out.

        Called: while it holds no sequence, when an adapter is switched on or off, so that the model
        computes something else, and while steps at fixed places are recorded and tried.
        """
        return

    def fix(self, rows: int) -> FixedStep:
        """Lay decode steps of up to `rows` sequences out at fixed addresses from now on.

        Of several such places a step takes the smallest that has room for its sequences and their
        pages. The returned place holds a step of padding, for which layers may be given keys and
        values any number of times until the next `prepare` or `forget`.

        Called: while it holds no sequence, where the backend declares `recordable`. A few steps of
        invented sequences are then played from there and compared with the same steps laid out
        elsewhere, before the first request.

        Violations: PluginError, and the model is not loaded, where these have other results or
        other addresses. In caches that are not jackfield's own, also in any later step whose
        tensors or pages have moved.
        """
        raise NotImplementedError(f"{type(self).__name__} has no steps at fixed places")

    def loosen(self, rows: int) -> None:
        """Undo `fix(rows)`: steps of so many sequences may lie anywhere again."""
        raise NotImplementedError(f"{type(self).__name__} has no steps at fixed places")

    def usage(self) -> CacheUsage | None:
        """What it holds, for statistics; None where that has no meaning of its own."""
        return None

    def close(self) -> None:
        """Free all memory: the engine is closed, but may still be referenced.

        Called once, after its last sequence was released; afterwards only `usage`.
        """
        return


class PackedKVCache(KVCache):
    """A cache of the packed layout: it stores keys and values itself, for the attention to read.

    Attributes:
        page_size: Tokens of a page; None: not known before the first step. It is what
            `BoundAttention.warm` is called with.
        rounding: What is stored for a token may be off by this part of the length of its keys, or
            of its values, from 0 to below 1. In some steps they are read back and compared.
        overlaps: `prepare` only lays tokens out. So on a GPU it may be handed the last token of
            each sequence as a placeholder, which is in `sequence.tokens` until it returns; before
            the model is called, the token itself is written to `input_ids`, and it is in
            `sequence.tokens` when `commit` is called, unless its text has ended in an error. The
            step before is computed meanwhile: what `prepare` changes on the device is to come
            after that, in the order of the current stream.
    """

    continuous: ClassVar[bool] = True
    page_size: int | None = None
    rounding: float = 0.25
    overlaps: bool = False

    @abstractmethod
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> PackedLayer:
        """Store this step's keys and values of one layer, and return what its attention reads.

        Called once a layer, between `prepare` and `commit`.

        Changes: the pages. `keys` and `values` are the model's: copy them, leave them as they are.

        Lives: the returned layer until the attention has returned. It may be the same object in
        every step, with other tables.

        Violations: PluginError, in every step, for spans, lengths, page numbers, first tokens,
        window and shapes that are not those of the step. In some steps (the first ones, those with
        new sequences, and the 2ⁿth) all page tables are compared, no page may belong to two
        sequences whose tokens differ, and what was stored is read back: a cache may round the keys
        or values of a token by a quarter of their length at most.

        Args:
            layer: Its index, from 0 on, as in `requirements.windows`.
            keys: `[tokens, kv_heads, head_dim]`, the step's tokens in the order of `scheduled`, on
                the model's device; strided views.
            values: `[tokens, kv_heads, head_dim]`, where values may have a `head_dim` of their own.

        Returns:
            Pages with these tokens and all earlier ones that a query sees; `window` is that of the
            layer in `requirements.windows`.
        """

    def native_write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[PackedLayer, NativeCall] | None:
        """What `write` would return, and a call that stores what is in `keys` and `values` then.

        Asked for each layer in each step that a compiler runs natively, in place of `write`, and
        before any of the calls is run. Not asked of a cache of another package in steps whose pages
        are read back. None: keys and values can be stored in Python only.

        Args:
            layer: As in `write`.
            keys: As in `write`; not computed yet.
            values: As in `write`; not computed yet.
        """
        del layer, keys, values
        return None

    def native_again(self, tokens: int) -> bool:
        """Have every call that `native_write` gave store the keys and values of this step.

        The tensors are those of the step before. Called after `prepare` and before `native_write`,
        where the pages that it returned still have their pools; not of a cache of another package.

        Args:
            tokens: How many keys there are.

        Returns:
            Whether it is so; otherwise `native_write` is asked for each layer.
        """
        del tokens
        return False


@dataclass(frozen=True)
class PaddedCache:
    """One of transformers' caches for each batch of rows; the engine lays the rows out.

    Attributes:
        make: `make(length)` returns an empty `transformers.Cache` for a batch of at most `length`
            columns (None: not known). Called once a batch; anything else returned is a PluginError.
            Behind an encoder, where requests may join those that run if it is a plain
            `DynamicCache`, once more when it is bound, and then for those that come together.
        max_cache_len: No batch has more columns than that; None: any number. A request that needs
            more is refused.
        static_shapes: Buffers keep their address and shape while a batch runs. Rows that finish
            then idle; otherwise they are taken out with `transformers.Cache.reorder_cache`.
        plain_tensors: Layers keep keys and values as tensors, whose bytes can be counted.
    """

    make: Callable[[int | None], transformers.Cache]
    max_cache_len: int | None = None
    static_shapes: bool = False
    plain_tensors: bool = True

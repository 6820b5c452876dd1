"""What a job needs of its backends: derived from a model's config before a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

#: What a model may need of its attention beyond causal softmax(QKᵀ)V, in one sentence each.
#: A backend that does not declare a feature does not have it.
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "grouped_query": "fewer key/value heads than query heads (GQA, MQA)",
        "mixed_head_sizes": "value heads of another size than query/key heads (MLA)",
        "sliding_window": "layers that see only the last `window` positions",
        "chunked": "layers that see only the positions of their own chunk",
        "softcap": "scores squashed by cap * tanh(score / cap)",
        "sinks": "a learned logit per head that takes part in the softmax and in nothing else",
        "position_bias": "a tensor added to the scores",
        "bidirectional_prefix": "a prompt whose tokens see one another in both directions",
        "bidirectional_blocks": "tokens of a prompt, those of an image, that see on to the end of "
        "their block, in pages",
        "cross_attention": "an encoder's tokens see one another, and a decoder's see all of them",
        "own_mask": "a mask that the model makes from the one it asked for",
        "own_attention": "attention that is part of the model's code and cannot be replaced, or is "
        "handed keyword arguments that nobody but that code knows",
    }
)

LAYOUTS = ("padded", "packed")
#: dtype -> bytes of a number
BYTES: Mapping[str, int] = MappingProxyType(
    {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
)
DTYPES = tuple(BYTES)
DEVICES = ("cpu", "cuda", "mps", "xpu")
#: Where it is shown that a sequence's bits can be kept from depending on the batch. Elsewhere the
#: means, softmaxes and products inside of a model split their sums by the number of rows.
INVARIANT_DEVICES = ("cpu",)


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, before it is loaded; tied ones are one.

    Attributes:
        name: As in `named_parameters()`.
        numbers: How many numbers it has.
        linear: `(out_features, in_features)` where it is the matrix of a linear layer that
            quantizers may store in their own way, which the output head is not; None otherwise.
        dtype: The one that it keeps whatever the model's is; None: it keeps none.
        transposed: The model has the matrix as in × out, a `Conv1D`.
        whole: `linear` as one process would have it, where this one shares the model with others
            and has a part of the matrix; None: it has all of it.
    """

    name: str
    numbers: int
    linear: tuple[int, int] | None = None
    dtype: str | None = None
    transposed: bool = False
    whole: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """One job, as backends see it when they accept or refuse it. It is read from a model's config.

    Where a field is *evidence*, it is a phrase that names the part of the model that proves it;
    None means that it is not so. Layers are cached layers, in their order.

    Attributes:
        architecture: The model: the name of its class.
        dtype: The job: name of the dtype of activations and of weights that are stored whole.
        device: The job: a torch device type, None while transformers itself is loading the model
            and has not said where.
        device_index: The job: the number of that device, None: the current one.
        num_attention_heads: Attention: query heads of a layer; 0: none attends (`attends`).
        num_key_value_heads: Attention: key and value heads, of the layer that has the fewest.
        head_dims: Attention: the sizes of heads that there are, ascending.
        layer_types: Layers: "full_attention", "sliding_attention", "chunked_attention" or
            "linear_attention", one each.
        states_apart: Layers: each of those with "linear_attention" has a module of its own that
            reads and writes its state, so that each sequence can have one.
        state_bytes: Layers: what the states of a sequence take in all of them at most, however long
            it is, in bytes; None: nobody can tell.
        windows: Layers: how many tokens each keeps, None where it sees everything.
        shared_layers: Layers: `(attention layer, cached layer)` for each attention beside those of
            the cached layers, which is handed the keys and values that this one keeps.
        dynamic_only: Layers: those of the model's own types that transformers' static caches do
            not know.
        features: Attention: each needed key of `FEATURES` with its evidence in the model
            ("attn_logit_softcapping = 50.0").
        model_declines: Attention: the transformers families ("sdpa", "flash", "flex") that the
            model's class says it must not be given.
        context_length: The model: how many tokens a sequence may have; None: no limit of its own.
        kv_numbers: Layers: how many numbers transformers' cache keeps of a token, one each; empty
            where it is unknown.
        packed_numbers: Layers: how many the attention is handed (more, where a cache keeps them
            compressed); empty where it is unknown.
        packed_shapes: Layers: the shapes of these keys and values, `(heads, head_dim)` each.
        token_numbers: The model: about how many numbers a layer makes of a token at a time.
        weights: Weights: the parameters that have to be loaded; none where the model is `live`.
        joined_weights: Weights: a tensor of its checkpoints that is several weights of the model,
            if there is one.
        weight_bytes: Weights: what they will take as they are stored, in bytes.
        head: Weights: `(out_features, in_features)` of the output head.
        tied_head: Weights: whether the head shares its weight with the embedding.
        stored: Weights: the `quantization_config` of a checkpoint, or of a live model, that is
            quantized already.
        live: The job: the model is loaded already.
        elsewhere: The job: it is only planned, for a device that this machine has not.
        dtype_named: The job: the caller named the dtype, so nobody may choose another.
        irregular: The model, evidence: an attention module is not one cached layer, or one of
            `shared_layers`, called once a step (layers that run in cycles).
        branches: The model, evidence: what a step computes is decided in Python, by numbers in it.
        counts_rows: The model, evidence: shapes within a step depend on numbers in it.
        ragged: The model, evidence: rows of several lengths would be wrong in one padded batch.
            Then only rows of one length run together. Behind an encoder: rows that join others, or
            begin with more tokens, would be wrong.
        pieces: The model, evidence: a prompt that is read in several steps would be wrong.
        holes: The model, evidence: a token that is masked out once it was read would be wrong.
        fixed: The model, evidence: a cache with columns that are not written yet would be wrong.
        plain_matrices: The model, evidence: a linear layer's matrix is used by other code than the
            layer's, so it has to be a plain tensor.
        encoder: The model, evidence: an encoder reads the prompt, once, and a sequence is what the
            decoder says.
        encoder_length: The model: how many tokens its encoder reads at most; None: no limit.
        no_heads: The model: why it has no heads for multi-token prediction that can draft; None:
            transformers makes some of its config.
        experts_implementation: The model: how mixture-of-experts layers have to be computed, where
            transformers' default does not do.
        execution_devices: Placement: the devices that layers compute on, the one where a step
            begins first; empty where that is one, `device`.
        offloaded: Placement: places that only hold weights (the CPU beside a GPU, "disk").
        tp_size: Placement: how many processes share the model (tensor parallelism); 1: none do.
            Heads, shapes, numbers and bytes are those of one of them, the one that plans.
        expert_parallel: Placement: each of them has some of a mixture's experts, as a whole, where
            otherwise it has a part of each.
        adapter: The job: the type of the adapter on top of the weights ("LORA"), None without one.
        merge_adapter: The job: the adapter is added into the weights.
        request_adapters: The job: each request may have an adapter of its own, computed beside the
            layers as they are called.
        layout: Of the cache: what it produces, "padded" or "packed".
        rollback: Of the decoding: tokens must be taken back.
        forks: Of the decoding: sequences go on as copies of others.
        batch_invariant: The job: a request's log-probabilities must have the same bits whatever
            else runs.
        page_size: Of the cache: how many tokens a page has where the caller says so; None: the
            cache chooses.
        page_multiple: Of the attention: it reads pages where they lie if their size is a multiple
            of it.
        compiled: Of the compiler: steps are compiled, around the attention and what the cache does.
        traced: Of the compiler: what it compiles is traced, so what a layer does in Python is done
            once and not in each step.
        recorded: Of the compiler: decode steps are recorded whole, with the attention and what the
            cache does, and kernels in the place of layers, so all must be `recordable`.
    """

    architecture: str
    dtype: str
    device: str | None
    device_index: int | None = None
    num_attention_heads: int
    num_key_value_heads: int
    head_dims: tuple[int, ...]
    layer_types: tuple[str, ...]
    states_apart: bool = False
    state_bytes: int | None = 0
    windows: tuple[int | None, ...] = ()
    shared_layers: tuple[tuple[int, int], ...] = ()
    dynamic_only: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)
    model_declines: frozenset[str] = frozenset()
    context_length: int | None = None
    kv_numbers: tuple[int, ...] = ()
    packed_numbers: tuple[int, ...] = ()
    packed_shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    token_numbers: int = 0
    weights: tuple[Weight, ...] = ()
    joined_weights: str | None = None
    weight_bytes: int = 0
    head: tuple[int, int] | None = None
    tied_head: bool = False
    stored: Mapping[str, Any] | None = None
    live: bool = False
    elsewhere: bool = False
    dtype_named: bool = False
    irregular: str | None = None
    branches: str | None = None
    counts_rows: str | None = None
    ragged: str | None = None
    pieces: str | None = None
    holes: str | None = None
    fixed: str | None = None
    plain_matrices: str | None = None
    encoder: str | None = None
    encoder_length: int | None = None
    no_heads: str | None = "nobody has looked for them"
    experts_implementation: str | None = None
    execution_devices: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    tp_size: int = 1
    expert_parallel: bool = False
    adapter: str | None = None
    merge_adapter: bool = False
    request_adapters: bool = False
    layout: str = "padded"
    rollback: bool = False
    forks: bool = False
    batch_invariant: bool = False
    page_size: int | None = None
    page_multiple: int = 1
    compiled: bool = False
    traced: bool = False
    recorded: bool = False

    @property
    def attends(self) -> bool:
        """Whether some layer attends. Of models that do not, each keeps a state (Mamba)."""
        return self.num_attention_heads > 0

    @property
    def computing_devices(self) -> tuple[str, ...]:
        """The torch devices that layers compute on, "cuda:1" or "cpu"; none while that is open."""
        if self.execution_devices or self.device is None:
            return self.execution_devices
        number = "" if self.device_index is None else f":{self.device_index}"
        return (f"{self.device}{number}",)

    @property
    def several_places(self) -> str | None:
        """Where weights lie, if that is not one device."""
        places = (*self.execution_devices, *self.offloaded)
        return ", ".join(places) if len(places) > 1 else None

    @property
    def varies(self) -> str | None:
        """Why bits would depend on the batch although `batch_invariant` is asked for."""
        computing = (self.device, *self.execution_devices)
        kinds = [d.partition(":")[0] for d in computing if d is not None]
        if not self.batch_invariant or set(kinds) <= set(INVARIANT_DEVICES):
            return None
        where = next(kind for kind in kinds if kind not in INVARIANT_DEVICES)
        return (
            f"deterministic=True is not kept on {where}, where the sums in a model's norms and "
            "products are split by the number of rows of the batch; load it with device_map='cpu',"
            " or drop deterministic"
        )

    @property
    def whole_prompt(self) -> str | None:
        """Why a prompt cannot be fed in several steps; None: it can."""
        if "linear_attention" in self.layer_types and self.layout != "packed":
            return "linear-attention layers"
        return self.features.get("bidirectional_prefix") or self.pieces

    @property
    def waits(self) -> str | None:
        """Why requests behind an encoder wait until a batch has ended; None: the model lets them
        join it, if the cache does.
        """
        return self.ragged if self.encoder is not None else None

    @property
    def heads_lack(self) -> list[str]:
        """Why nothing can be drafted with the model's own heads; empty: there is no reason."""
        reasons = [self.no_heads] if self.no_heads else []
        reasons += one_process(self, "heads read one process's hidden states")
        if self.compiled:
            reasons.append("compiled steps do not show the hidden states that heads read")
        if self.several_places:
            reasons.append(f"heads are read to one device, and weights go to {self.several_places}")
        if self.adapter or self.request_adapters:
            reasons.append("heads were trained without an adapter, which changes what they read")
        return reasons

    @property
    def no_grouped_experts(self) -> str:
        """What is wrong with the grouped product where `experts_implementation` is not None."""
        if self.dtype == "float64":
            return "takes no float64"
        if self.batch_invariant:
            return "has sums that depend on the batch"
        return "is switched off in the live model (experts_implementation='eager')"


def one_process(requirements: Requirements, what: str) -> list[str]:
    """The reason `what` against a job that several processes share; none against others."""
    size = requirements.tp_size
    return [f"{what}, and tp_size={size} shares them among processes"] if size > 1 else []

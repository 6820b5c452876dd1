"""What a backend of each kind must be, and every type that it is handed.

One file a kind: `attention`, `cache` (bound: `kv_cache`), `compiling`, `decoding`, `kernels`,
`quantizing`, `scheduling`; what all have is in `backend`. What backends are handed is in
`sequences`, `settings`, `packed`, `model_inputs`, `requirements`, `assistant` and `checkpoint`;
what they offer to be called without Python is in `native`; what they may use is in `sizes`,
`staging`, `counter_rng` and `private_files`. A backend needs nothing else of jackfield but
`hookimpl` and `jackfield.errors`. Importable without torch.
"""

from jackfield.contracts.assistant import Assistant
from jackfield.contracts.attention import (
    Attention,
    AttentionCapabilities,
    BoundAttention,
    ModelAttention,
)
from jackfield.contracts.backend import Backend, BindContext, NoOptions
from jackfield.contracts.cache import Cache, CacheCapabilities, TransformersCache
from jackfield.contracts.checkpoint import StoredTensor
from jackfield.contracts.compiling import Compilation, Compiler, CompilerCapabilities, Uncompiled
from jackfield.contracts.decoding import (
    SAMPLER_SETTINGS,
    Accepted,
    Continuation,
    Decision,
    Decoding,
    DecodingCapabilities,
    Search,
    Strategy,
    TokenLogprob,
)
from jackfield.contracts.kernels import (
    FusedLayer,
    FusedRotary,
    Kernel,
    KernelCapabilities,
    rotary_of,
)
from jackfield.contracts.kv_cache import KVCache, PackedKVCache, PaddedCache
from jackfield.contracts.model_inputs import CacheUsage, FixedStep, ModelInputs
from jackfield.contracts.native import Native, NativeCall, NativeOffers, NativeOperators
from jackfield.contracts.packed import Blocks, PackedLayer, PackedStep, PageTables, Span
from jackfield.contracts.quantizing import (
    GivenConfig,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
)
from jackfield.contracts.requirements import FEATURES, Requirements, Weight
from jackfield.contracts.scheduling import PATIENCE, Schedule, Scheduler
from jackfield.contracts.sequences import (
    BeamGroup,
    Hypothesis,
    ScheduledSequence,
    Sequence,
    Step,
    Tokens,
)
from jackfield.contracts.settings import BeamSettings, DraftSettings, Settings, Structure
from jackfield.contracts.sizes import known, kv_bytes
from jackfield.contracts.staging import StepBlock
from jackfield.devices import free_bytes
from jackfield.quieting import TORCHAO, quieted
from jackfield.units import in_units

__all__ = [
    "FEATURES",
    "PATIENCE",
    "SAMPLER_SETTINGS",
    "TORCHAO",
    "Accepted",
    "Assistant",
    "Attention",
    "AttentionCapabilities",
    "Backend",
    "BeamGroup",
    "BeamSettings",
    "BindContext",
    "Blocks",
    "BoundAttention",
    "Cache",
    "CacheCapabilities",
    "CacheUsage",
    "Compilation",
    "Compiler",
    "CompilerCapabilities",
    "Continuation",
    "Decision",
    "Decoding",
    "DecodingCapabilities",
    "DraftSettings",
    "FixedStep",
    "FusedLayer",
    "FusedRotary",
    "GivenConfig",
    "Hypothesis",
    "KVCache",
    "Kernel",
    "KernelCapabilities",
    "ModelAttention",
    "ModelInputs",
    "Native",
    "NativeCall",
    "NativeOffers",
    "NativeOperators",
    "NoOptions",
    "PackedKVCache",
    "PackedLayer",
    "PackedStep",
    "PaddedCache",
    "PageTables",
    "Quantization",
    "Quantizer",
    "QuantizerCapabilities",
    "Requirements",
    "Schedule",
    "ScheduledSequence",
    "Scheduler",
    "Search",
    "Sequence",
    "Settings",
    "Span",
    "Step",
    "StepBlock",
    "StoredTensor",
    "Strategy",
    "Structure",
    "TokenLogprob",
    "Tokens",
    "TransformersCache",
    "Uncompiled",
    "Weight",
    "free_bytes",
    "in_units",
    "known",
    "kv_bytes",
    "quieted",
    "rotary_of",
]

#: kind -> the base class that its backends derive from
CONTRACTS: dict[str, type[Backend]] = {
    "attention": Attention,
    "cache": Cache,
    "compiler": Compiler,
    "decoding": Decoding,
    "kernel": Kernel,
    "quantizer": Quantizer,
    "scheduler": Scheduler,
}

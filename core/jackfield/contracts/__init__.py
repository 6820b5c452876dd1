"""What a backend of each kind must be: one file a kind, importable without torch."""

from jackfield.contracts.attention import (
    Attention,
    AttentionCapabilities,
    BoundAttention,
    ModelAttention,
)
from jackfield.contracts.backend import Backend, BindContext, NoOptions
from jackfield.contracts.cache import (
    Cache,
    CacheCapabilities,
    CacheUsage,
    KVCache,
    ModelInputs,
    PackedKVCache,
    TransformersCache,
)
from jackfield.contracts.checkpoint import StoredTensor
from jackfield.contracts.compiling import Compilation, Compiler, CompilerCapabilities, Uncompiled
from jackfield.contracts.decoding import (
    SAMPLER_SETTINGS,
    Accepted,
    Assistant,
    Continuation,
    Decision,
    Decoding,
    DecodingCapabilities,
    Hypothesis,
    Search,
    Strategy,
)
from jackfield.contracts.kernels import FusedLayer, Kernel, KernelCapabilities
from jackfield.contracts.packed import PackedLayer, PackedStep, PageTables, Span
from jackfield.contracts.quantizing import (
    GivenConfig,
    Quantization,
    Quantizer,
    QuantizerCapabilities,
)
from jackfield.contracts.requirements import FEATURES, Requirements, Weight
from jackfield.contracts.scheduling import Schedule, Scheduler
from jackfield.contracts.staging import StepBlock

__all__ = [
    "FEATURES",
    "SAMPLER_SETTINGS",
    "Accepted",
    "Assistant",
    "Attention",
    "AttentionCapabilities",
    "Backend",
    "BindContext",
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
    "FusedLayer",
    "GivenConfig",
    "Hypothesis",
    "KVCache",
    "Kernel",
    "KernelCapabilities",
    "ModelAttention",
    "ModelInputs",
    "NoOptions",
    "PackedKVCache",
    "PackedLayer",
    "PackedStep",
    "PageTables",
    "Quantization",
    "Quantizer",
    "QuantizerCapabilities",
    "Requirements",
    "Schedule",
    "Scheduler",
    "Search",
    "Span",
    "StepBlock",
    "StoredTensor",
    "Strategy",
    "TransformersCache",
    "Uncompiled",
    "Weight",
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

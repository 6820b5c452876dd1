"""Flags of other servers (vLLM, SGLang, llama.cpp, TGI), and what `jackfield serve` has instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jackfield.cli.flag_words import SHORT, SO
from jackfield.requests.instead import is_neutral

_ONE_PROCESS = "there is none: processes of one machine share a model's layers with --tp N"
_CONTEXT = (
    "there is none: the context is the model's; --max-completion-tokens N bounds answers, and "
    "--cache 'paged?num_tokens=N' what is kept"
)
_MODEL = "write jackfield serve MODEL: a hub id, a folder, or a GGUF file"
_NAMES = "there is none: models have the names that they have in the file of --config"
_TEMPLATE = "there is none: the tokenizer's own is used; write yours into the model's folder"
_FOUND = "drop it: how a model writes calls and thoughts is found from its chat template"
_ALWAYS = "drop it: it is always so"
_KEY = "set JACKFIELD_API_KEY=KEY in the environment, or write --new-key NAME"
_SHARE = "write --cache 'paged?memory=0.9', a share of what is free, and --max-memory for weights"
_FIELD = "it is a field of each request"
_CONFIG = "there is none: it stands in the model's config"
_LOGS = "drop it: logs are lines of JSON, without prompts unless --log-texts"
_TEXT = "there is none: texts are made here, and no embeddings"
_OWN = "there is none: the model's own counts, and fields of each request go before it"
_DRAFTS = "write --decoding 'assisted?num_assistant_tokens=N' --assistant-model MODEL"
_CACHE_BITS = (
    "write --cache 'quantized?backend=hqq&nbits=8', or 'quantized?nbits=4' with optimum-quanto"
)
_FILES = "there is none: weights are read from safetensors or GGUF"

#: answer -> the flags that it answers, without dashes; those of one dash are in `_SHORT`
_ANSWERS: dict[str, str] = {
    "write --tp N": "tensor-parallel-size tp-size num-shard",
    "write --replicas N": "data-parallel-size dp-size dp",
    _ONE_PROCESS: "pipeline-parallel-size pp-size sharded distributed-executor-backend nnodes "
    "node-rank ep-size enable-expert-parallel dist-init-addr numa rpc",
    _CONTEXT: "max-model-len ctx-size context-length max-total-tokens max-input-length "
    "max-input-tokens max-seq-len-to-capture",
    _MODEL: "model model-path hf-repo hf-file model-url",
    _NAMES: "served-model-name alias",
    _TEMPLATE: "chat-template chat-template-file tokenizer-config-path",
    _FOUND: "tool-call-parser enable-auto-tool-choice reasoning-parser reasoning-format "
    "enable-reasoning jinja no-jinja",
    _ALWAYS: "enable-chunked-prefill cont-batching cache-prompt mmap use-v2-block-manager",
    "drop it: GET /metrics always answers": "metrics enable-metrics",
    "there is none: GET /v1/report and /v1/plan say what runs": "slots props",
    "there is none: requests always join those that run; --max-batch-size 1 has one at a time": ""
    "no-cont-batching",
    "there is none: weights are always mapped from their files": "no-mmap",
    "there is none: prompts are always fed beside other requests; --max-batch-tokens N bounds a "
    "step": "no-enable-chunked-prefill",
    "write --compile none": "enforce-eager disable-cuda-graph no-cb-use-cuda-graph no-compile",
    "drop it: no other site may ask without --cors-origin": "no-enable-cors",
    "write --cors-origin ORIGIN, or '*' for all": "enable-cors",
    "there is none: a model that reads images has what it needs in its folder": "mmproj mmproj-url",
    "there is none: a chat may have images up to what the context holds": "limit-mm-per-prompt",
    _OWN: "generation-config override-generation-config default-sampling-params",
    "there is none: the tokenizer in the model's folder is used": "tokenizer tokenizer-path",
    "there is none: answers are the assistant's": "response-role",
    "drop it: what a message may be is found from its chat template": ""
    "chat-template-content-format",
    "drop it: prompts are kept while the server runs, and in no file": "prompt-cache "
    "slot-save-path",
    "there is none: code from a model's repository is never run": "trust-remote-code",
    "drop it: a prompt that is too long is refused, never cut": "no-truncate no-context-shift",
    "there is none: a prompt that is too long is refused": "truncate context-shift",
    "there is none: an adapter may have any rank": "max-lora-rank",
    _KEY: "api-key api-key-file",
    _SHARE: "gpu-memory-utilization mem-fraction-static cuda-memory-fraction",
    _CACHE_BITS: "kv-cache-dtype cache-type-k cache-type-v",
    _CONFIG: "rope-scaling rope-theta rope-freq-base rope-freq-scale rope-factor rope-scale "
    "yarn-orig-ctx yarn-ext-factor hf-overrides override-kv",
    _LOGS: "disable-log-requests disable-log-stats uvicorn-log-level json-output log-disable "
    "log-file log-requests disable-uvicorn-access-log verbose log-verbosity quiet max-log-len json "
    "enable-log-requests no-enable-log-requests",
    _TEXT: "embedding embeddings reranking rerank pooling runner convert",
    _DRAFTS: "speculative-config speculative-model num-speculative-tokens model-draft draft-max "
    "draft draft-min speculative-algorithm speculative-draft-model-path",
    _FILES: "load-format safetensors-load-strategy",
    _FIELD: "temp json-schema grammar seed-per-request predict n-predict repeat-penalty",
    "it is the field grammar of each request, as Lark has them": "grammar-file",
    "there is none": "samplers sampling-seq mirostat mirostat-lr mirostat-ent repeat-last-n "
    "typical dry-multiplier dry-base dry-allowed-length dry-penalty-last-n xtc-probability "
    "xtc-threshold dynatemp-range top-nsigma cache-reuse cache-ram threads-http kv-unified "
    "cpu-moe n-cpu-moe async-scheduling prio prio-batch",
    "drop it: steps that are compiled are so before it answers": "warmup",
    SO: "no-warmup",
    "drop it: a model stays while the server runs, or as long as --model-timeout says": ""
    "keep-alive keepalive",
    "write --max-batch-size N": "max-num-seqs parallel max-running-requests",
    "write --max-batch-tokens N": "max-num-batched-tokens max-batch-prefill-tokens ubatch-size "
    "chunked-prefill-size max-prefill-tokens long-prefill-token-threshold",
    "write --cache 'paged?num_tokens=N'": "max-batch-total-tokens num-gpu-blocks-override",
    "write --cache 'paged?page_size=N'": "block-size page-size",
    "write --cache 'paged?prefix_sharing=no' to turn it off": ""
    "no-enable-prefix-caching disable-radix-cache no-cache-prompt",
    "drop it: beginnings of prompts are found where the cache can": "enable-prefix-caching",
    "write --cache 'paged?swap=yes'": "swap-space",
    "a GPU takes the whole model by itself; to part it, write --max-memory 0=10GB,cpu=40GB": ""
    "cpu-offload-gb gpu-layers n-gpu-layers tensor-split "
    "main-gpu split-mode",
    "write --attention NAME": "attention-backend flash-attn",
    "write --quantization NAME": "quantize",
    "write --compile NAME": "compilation-config cuda-graphs enable-torch-compile",
    "write --decoding prompt_lookup": "speculate lookup-cache-static lookup-cache-dynamic",
    "write --scheduler NAME": "scheduling-policy schedule-policy waiting-served-ratio "
    "max-waiting-tokens",
    "write --max-waiting N": "max-concurrent-requests max-queued-requests",
    "write --default-seed N": "seed random-seed",
    "write --adapters NAME=FOLDER,NAME=FOLDER": "lora lora-modules lora-adapters lora-paths "
    "enable-lora",
    "write --cors-origin ORIGIN": "allowed-origins cors-allow-origin",
    "write --host HOST": "hostname",
    "write --deadline SECONDS": "timeout",
    "write --ssl-keyfile FILE": "ssl-key-file",
    "write --ssl-certfile FILE": "ssl-cert-file",
    "there is none: this server asks for no certificates of clients; a proxy can": "ssl-ca-certs "
    "ssl-cert-reqs",
    "write page = false into the file of --config": "no-webui no-ui",
    "write max_samples = N into the file of --config": "max-best-of",
    "there is none: up to 20 are given": "max-logprobs max-top-n-tokens",
    "write --reasoning off, or on": "reasoning-budget enable-thinking",
    "set OMP_NUM_THREADS=N in the environment": "threads threads-batch",
    "set HF_HUB_CACHE=FOLDER in the environment": "download-dir huggingface-hub-cache "
    "weights-cache-override",
    "set HF_TOKEN=… in the environment, or run `hf auth login`": "hf-token",
    "set OTEL_EXPORTER_OTLP_ENDPOINT=URL in the environment": "otlp-endpoint otlp-traces-endpoint",
    "there is none: structures are followed with llguidance": "guided-decoding-backend "
    "structured-outputs-config grammar-backend disable-grammar-support",
    "drop it: nothing of use is sent to anybody": "usage-stats",
    "drop it: memory is not locked": "mlock",
    "there is none: a proxy in front can have one": "root-path",
}  # fmt: skip

#: Flags of one dash, by what they are called in full.
_SHORT = {
    "-a": "alias", "-b": "ubatch-size", "-c": "ctx-size", "-cb": "cont-batching",
    "-ctk": "cache-type-k", "-ctv": "cache-type-v", "-dp": "data-parallel-size",
    "-fa": "flash-attn", "-hf": "hf-repo", "-hff": "hf-file", "-j": "json-schema", "-m": "model",
    "-md": "model-draft", "-mg": "main-gpu", "-n": "predict", "-ngl": "gpu-layers",
    "-np": "parallel", "-O": "compilation-config", "-pp": "pipeline-parallel-size",
    "-q": "quantize", "-s": "seed", "-sm": "split-mode", "-t": "threads", "-tb": "threads-batch",
    "-to": "timeout", "-tp": "tensor-parallel-size", "-ts": "tensor-split", "-ub": "ubatch-size",
    "-v": "verbose",
}  # fmt: skip


#: Switches of which it is said why nobody has to write them.
_SAID_TRUE = frozenset(
    {"cache_prompt", "enable_chunked_prefill", "enable_prefix_caching", "use_v2_block_manager"}
)


def _table() -> Iterator[tuple[str, str]]:
    for answer, names in _ANSWERS.items():
        yield from ((f"--{name}", answer) for name in names.split())


FLAGS = dict(_table())
FLAGS |= {short: FLAGS[f"--{name}"] for short, name in _SHORT.items()}


def as_written(flag: str, arguments: Sequence[str]) -> str:
    """`flag` as `arguments` have it: of one like -ngl a parser tells the first letter alone."""
    words = [argument.partition("=")[0] for argument in arguments]
    meant = flag.lstrip("-").replace("-", "_")
    if flag not in words and (short := next((w for w in words if SHORT.get(w) == meant), None)):
        return short
    known = FLAGS.keys() | SHORT.keys()
    return next((w for w in words if len(flag) == 2 and w in known and w.startswith(flag)), flag)


def instead_of_flag_of_server(flag: str, value: Any = None) -> str | None:
    """What to write instead of `flag`, behind which stands `value`; None: no idea."""
    flag = flag.replace("_", "-")
    name = _SHORT.get(flag, flag.lstrip("-")).replace("-", "_")
    if value is not None and is_neutral(name, value) and not (value is True and name in _SAID_TRUE):
        return SO
    if name in ("speculative_config", "speculative_model") and "ngram" in str(value):
        return "write --decoding prompt_lookup"
    return FLAGS.get(flag)

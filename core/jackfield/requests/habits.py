"""What is written in plain transformers code, and what it is here: data, which one test walks.

The page `docs/coming-from-transformers.md` shows these tables. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jackfield.requests.tokenizer_words import TOKENIZER_WORDS


@dataclass(frozen=True)
class Habit:
    """A keyword of transformers: taken as one of ours, or answered with what to write.

    `ours` is the argument of `jackfield.load` that means the same, with the same value or, where
    it is in `values`, with ours. `inert` are the values that ask for what is so anyway; None always
    is. `answer` says what to do about every other value; without one, all are taken.
    """

    answer: str = ""
    ours: str | None = None
    values: Mapping[Any, str] = field(default_factory=dict)
    inert: tuple[Any, ...] = ()

    def asks_for_nothing(self, value: Any) -> bool:
        return any(type(value) is type(same) and value == same for same in self.inert)


_HERE = "give a folder of your own as the model"
_HUB = "the hub's own environment variable does that"
_LIVE = "load the model with transformers and give the live model"
_TEXT = "jackfield makes text from text, images and sounds; drop it"
_PROMPT = "it belongs to a call, not to loading"
_PARALLEL = "write tp_size=N, or under torchrun tp_plan='auto': processes share the model"
_NO_CODE = f"jackfield runs no code from a model's repository; {_LIVE}"
_BOOL = "say True or False"

#: Names that the prompts of a call have, beside being its first argument.
PROMPTS = ("inputs", "text_inputs", "prompt", "prompts")

#: What `from_pretrained` and `pipeline` take beside the arguments that have the same name here.
KEYWORDS: Mapping[str, Habit] = {
    # the same thing under another name
    "device": Habit(ours="device_map", values={-1: "cpu"}),
    "pretrained_model_name_or_path": Habit(
        "it is the first argument, without a name: jackfield.load('MODEL')"
    ),
    "quantization_config": Habit(ours="quantization"),
    "torch_dtype": Habit(ours="dtype"),
    "load_in_4bit": Habit(_BOOL, "quantization", {True: "bnb-4bit"}, (False,)),
    "load_in_8bit": Habit(_BOOL, "quantization", {True: "bnb-8bit"}, (False,)),
    "use_flash_attention_2": Habit(
        _BOOL, "attn_implementation", {True: "flash_attention_2"}, (False,)
    ),
    "use_kernels": Habit(
        "kernels are named one by one: kernels=['NAME'], with the names of `jackfield plugins`",
        "kernels",
        {False: "none"},
    ),
    "kernel_config": Habit("kernels are named: kernels=['hub-layer?repo=…&revision=…']"),
    "allow_all_kernels": Habit(
        "a kernel of the hub is named with its revision: 'hub?repo=…&revision=…'", inert=(False,)
    ),
    "adapter_name": Habit(
        "write adapter='FOLDER', or adapters={'NAME': 'FOLDER'}", inert=("default",)
    ),
    "adapter_kwargs": Habit("write adapter='FOLDER', the folder of the adapter", inert=({},)),
    "assistant_tokenizer": Habit("write assistant={'tokenizer': …}"),
    "batch_size": Habit(ours="max_batch_size"),
    "compile_config": Habit("a compiler is named with its options: compile='inductor?mode=…'"),
    "cache_config": Habit("options stand in the name: cache_implementation='quantized?nbits=4'"),
    "disable_compile": Habit(_BOOL, "compile", {True: "none"}, (False,)),
    "continuous_batching_config": Habit(
        "write cache_implementation='paged?page_size=…&num_tokens=…' and max_batch_tokens=…"
    ),
    "custom_generate": Habit("a decoding is a plugin: decoding='NAME'"),
    # what is so anyway, or never
    "_fast_init": Habit("no weight is initialised before it is read; drop it", inert=(True,)),
    "low_cpu_mem_usage": Habit("weights are read one by one; drop it", inert=(True,)),
    "use_safetensors": Habit(
        "weights are read from safetensors only; save the model with save_pretrained", inert=(True,)
    ),
    "weights_only": Habit("weights are read from safetensors only, never pickled", inert=(True,)),
    "use_fast": Habit("give a tokenizer of your own: tokenizer=…", inert=(True,)),
    "trust_remote_code": Habit(_NO_CODE, inert=(False,)),
    "code_revision": Habit(_NO_CODE),
    "ignore_mismatched_sizes": Habit(
        "a weight of another shape is an error here; mend the checkpoint", inert=(False,)
    ),
    "output_loading_info": Habit("engine.explain() and engine.report() say it", inert=(False,)),
    "from_tf": Habit("weights are read from safetensors only; convert them", inert=(False,)),
    "from_flax": Habit("weights are read from safetensors only; convert them", inert=(False,)),
    "disable_mmap": Habit("files of weights are always mapped; drop it", inert=(False,)),
    "offload_state_dict": Habit("weights are read one by one; drop it", inert=(False,)),
    "offload_buffers": Habit("buffers stay where a step computes; drop it", inert=(False,)),
    "experts_implementation": Habit(
        "the plan chooses how experts are computed and says so; set it on a live model"
    ),
    "tqdm_class": Habit("loading shows no bar; drop it"),
    # where files come from
    "cache_dir": Habit(f"{_HUB}: HF_HUB_CACHE=FOLDER"),
    "force_download": Habit("delete the model from the hub's cache: `hf cache`", inert=(False,)),
    "resume_download": Habit("downloads are resumed; drop it", inert=(True, False)),
    "local_files_only": Habit(f"{_HUB}: HF_HUB_OFFLINE=1", inert=(False,)),
    "proxies": Habit("set HTTPS_PROXY in the environment"),
    "mirror": Habit(f"{_HUB}: HF_ENDPOINT=URL"),
    "token": Habit(f"{_HUB}: HF_TOKEN=…, or `hf auth login`"),
    "use_auth_token": Habit(f"{_HUB}: HF_TOKEN=…, or `hf auth login`", inert=(False,)),
    "subfolder": Habit(f"fetch it with `hf download` and {_HERE}", inert=("",)),
    "variant": Habit(f"fetch it with `hf download`, rename its weights, and {_HERE}"),
    "gguf_file": Habit("give the file itself as the model: 'FOLDER/FILE.gguf'"),
    # a model that is made another way
    "config": Habit(f"a model has the config in its folder; {_LIVE}"),
    "state_dict": Habit(_LIVE),
    "key_mapping": Habit(f"{_LIVE}, or save it under the new names"),
    "fusion_config": Habit(f"fused layers are kernels here: kernels=['NAME']; or {_LIVE}"),
    "generation_config": Habit("give it to a call: engine.generate(…, generation_config=…)"),
    "model_kwargs": Habit("write its arguments beside the others"),
    "model_args": Habit(_LIVE),
    # several processes
    "device_mesh": Habit(_PARALLEL),
    "distributed_config": Habit(_PARALLEL),
    # what pipelines for other tasks take
    "task": Habit("drop it: text generation is the only one", inert=("text-generation",)),
    "framework": Habit("torch is the only one; drop it", inert=("pt",)),
    "feature_extractor": Habit("give the processor that it is a part of: tokenizer=processor"),
    "image_processor": Habit("give the processor that it is a part of: tokenizer=processor"),
    "video_processor": Habit(_TEXT),
    "processor": Habit(
        "a model that reads images or sounds takes it as its tokenizer: tokenizer=processor"
    ),
    "modelcard": Habit("nobody reads it; drop it"),
    "pipeline_class": Habit("an engine is no pipeline; drop it"),
    "num_workers": Habit("prompts need no workers; drop it"),
    "binary_output": Habit("a Completion has text and token ids; drop it", inert=(False,)),
    "args_parser": Habit("engine.generate takes a prompt or a list of prompts; drop it"),
    # what a text pipeline does with its prompts and texts
    "return_full_text": Habit("a Completion's text is what is new", inert=(False,)),
    "return_tensors": Habit("a Completion has token_ids beside its text", inert=(False,)),
    "return_text": Habit("a Completion has text beside its token ids", inert=(True,)),
    "return_type": Habit("a Completion has text and token_ids; drop it"),
    "clean_up_tokenization_spaces": Habit("text is what its tokens say; drop it", inert=(False,)),
    "prefix": Habit("write it in front of the prompts; drop it", inert=("",)),
    "handle_long_generation": Habit("a prompt that is too long is an error; shorten it"),
    "stop_sequence": Habit("a call stops at a text: engine.generate(…, stop=['…'])"),
    "truncation": Habit("a prompt that is too long is an error; shorten it", inert=(False,)),
    "padding": Habit("rows of several lengths need no padding; drop it", inert=(False, True)),
    "add_special_tokens": Habit("give token ids, if the tokenizer's own are not to be added"),
    "continue_final_message": Habit(f"{_PROMPT}: engine.generate(…, continue_final_message=True)"),
    "add_generation_prompt": Habit(f"{_PROMPT}: engine.generate(…, add_generation_prompt=True)"),
    "skip_special_tokens": Habit(
        f"{_PROMPT}: engine.generate(…, skip_special_tokens=False)", inert=(True,)
    ),
    **{name: Habit(answer) for name, answer in TOKENIZER_WORDS.items()},
    "verbose": Habit("what happens is in the log of the name jackfield; drop it", inert=(False,)),
    "tokenizer_encode_kwargs": Habit("give token ids, made by the tokenizer as you like"),
    "tools": Habit(f"{_PROMPT}: engine.generate(…, tools=[…])"),
    "documents": Habit(f"{_PROMPT}: engine.generate(…, documents=[…])"),
    "chat_template_kwargs": Habit(f"{_PROMPT}: engine.generate(…, chat_template_kwargs={{…}})"),
    "enable_thinking": Habit(f"{_PROMPT}: engine.generate(…, enable_thinking=…)"),
    "chat_template": Habit(
        "give a tokenizer with it; or render the chat and give its token ids: engine.generate("
        "engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
        "chat_template=…))"
    ),
    # what `generate` takes beside settings
    "input_ids": Habit(f"{_PROMPT}: engine.generate(input_ids=…, attention_mask=…)"),
    "attention_mask": Habit(f"{_PROMPT}: engine.generate(input_ids=…, attention_mask=…)"),
    **dict.fromkeys(PROMPTS, Habit(f"{_PROMPT}: engine.generate('…')")),
    "logits_processor": Habit(f"{_PROMPT}: engine.generate(…, logits_processor=…)"),
    "stopping_criteria": Habit(f"{_PROMPT}: engine.generate(…)"),
    "prefix_allowed_tokens_fn": Habit(f"{_PROMPT}: engine.generate(…)"),
    "streamer": Habit(f"{_PROMPT}: for delta in engine.stream(…)"),
    "synced_gpus": Habit("all processes of an engine take each step; drop it", inert=(False,)),
    "negative_prompt_ids": Habit(f"{_PROMPT}: engine.generate(…, negative_prompt=…)"),
    "negative_prompt_attention_mask": Habit(f"{_PROMPT}: engine.generate(…, negative_prompt=…)"),
    "use_model_defaults": Habit("a model's generation_config.json counts; drop it", inert=(True,)),
}

#: Settings of `generate` that name a decoding: what they say becomes its options.
DECODINGS: Mapping[str, str] = {
    "num_beams": "beam",
    "prompt_lookup_num_tokens": "prompt_lookup",
    "assistant_model": "assisted",
    "assistant_early_exit": "assisted",
    "use_mtp": "mtp",
}
#: Options of a decoding that go along where it is named so.
DECODING_OPTIONS: Mapping[str, str] = {
    "length_penalty": "beam",
    "early_stopping": "beam",
    "max_matching_ngram_size": "prompt_lookup",
    "num_assistant_tokens": "assisted",
    "num_assistant_tokens_schedule": "assisted",
    "assistant_confidence_threshold": "assisted",
}

#: kind -> transformers' value -> ours, where both mean the same under different names.
VALUES: Mapping[str, Mapping[Any, str]] = {
    "cache": {
        "hybrid": "static",
        "hybrid_chunked": "static",
        "sliding_window": "static",
        "offloaded_hybrid": "offloaded_static",
        "offloaded_hybrid_chunked": "offloaded_static",
    },
    "compiler": {True: "inductor", False: "none"},
    "kernel": {False: "none"},
}

#: kind -> transformers' value -> what to write, where there is no such name here.
NAMES: Mapping[str, Mapping[Any, str]] = {
    "attention": {
        "flash_attention_4": "hub?repo=kernels-community/flash-attn4&revision=…",
    },
    "compiler": {
        "reduce-overhead": "cuda_graph",
        "max-autotune": "inductor?mode=max-autotune-no-cudagraphs",
        "max-autotune-no-cudagraphs": "inductor?mode=max-autotune-no-cudagraphs",
        "default": "inductor",
    },
    "quantizer": {
        "4bit": "bnb-4bit",
        "8bit": "bnb-8bit",
        "int4": "bnb-4bit' or 'int4-cpu",
        "int8": "int8-cpu', 'bnb-8bit' or 'torchao",
        "bitsandbytes": "bnb-4bit' or 'bnb-8bit",
        "bitsandbytes_4bit": "bnb-4bit",
        "bitsandbytes_8bit": "bnb-8bit",
        "nf4": "bnb-4bit?type=nf4",
        "fp4": "bnb-4bit?type=fp4",
    },
}

#: A config object of transformers that no backend takes -> what it left unsaid.
UNSAID: Mapping[str, str] = {
    "BitsAndBytesConfig": "quantizes nothing: write load_in_4bit=True or load_in_8bit=True in it",
}

#: Other names of dtypes -> ours.
DTYPES_OF: Mapping[str, str] = {
    "bf16": "bfloat16",
    "double": "float64",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
}

_SERVER = "it is a flag of `jackfield serve`"
_PAGES = "write --cache 'paged?"

#: Flags of `transformers chat`, `serve`, `download` and `env` that are no keyword, without dashes.
FLAGS: Mapping[str, str] = {
    "base_url": "`jackfield chat --server URL` asks a server",
    "cb_block_size": f"{_PAGES}page_size=N'",
    "cb_max_batch_tokens": "write --max-batch-tokens N",
    "cb_max_memory_percent": f"{_PAGES}memory=0.5'",
    "cb_num_blocks": f"{_PAGES}num_tokens=N', in tokens",
    "cb_use_cuda_graph": "write --compile cuda_graph",
    "chat_template_kwargs": "write --set 'chat_template_kwargs={…}'",
    "continuous_batching": "requests always join at any step where the cache can: --cache paged",
    "decision_config": "no endpoint decides; log-probabilities do: generate --logprobs N --json",
    "default_seed": "write --seed N",
    "enable_cors": "write `jackfield serve --cors-origin '*'`",
    "examples_path": "pipe messages into it, one a line",
    "force_model": "write `jackfield serve MODEL`",
    "generate_flags": "write --set key=value",
    "generation_config": "write --set key=value for each of its settings",
    "host": _SERVER,
    "log_level": "write `jackfield --debug COMMAND`, or nothing",
    "max_batch_size": "it is a flag of `jackfield generate` and `chat`",
    "max_batch_tokens": "it is a flag of `jackfield generate` and `chat`; `memory` has "
    "--prefill-tokens N",
    "model_timeout": _SERVER,
    "non_blocking": "`jackfield serve` runs until a signal ends it; start it in the background",
    "port": _SERVER,
    "reasoning": "write --set 'chat_template_kwargs={…}' with what the model's template reads",
    "save_folder": "send what is shown into a file: `jackfield chat | tee FILE`",
    "system_prompt": "give the messages in Python: engine.generate([{'role': 'system', …}, …])",
    "user": "nobody's name is shown; drop it",
    "accelerate_config_file": "`jackfield doctor` says what is installed here",
}

#: The flag of our command line for an argument of `jackfield.load`, where it has another name.
FLAG_OF: Mapping[str, str] = {
    "attn_implementation": "--attention",
    "cache_implementation": "--cache",
    "device_map": "--device",
    "image_hosts": "--image-host",
    "kernels": "--kernel",
    "tp_plan": "--tp",
    "tp_size": "--tp",
}

_FETCH = "`hf download MODEL` fetches a model; one that is named is fetched anyway"
_NO_LIST = "models are named by where they are, and there is no list; `hf cache ls` has the hub's"
#: Commands of transformers and Ollama that have another name here.
COMMANDS: Mapping[str, str] = {
    "add-new-model-like": "a model is added to transformers itself",
    "download": _FETCH,
    "env": "`jackfield doctor` says what is installed here",
    "list": _NO_LIST,
    "ls": _NO_LIST,
    "ps": "GET /v1/report of a server says what runs",
    "pull": _FETCH,
    "run": "`jackfield generate PROMPT` makes text, and `jackfield chat MODEL` talks",
    "show": "`jackfield explain -m MODEL` says what would run it",
    "version": "`jackfield --version` says it",
}

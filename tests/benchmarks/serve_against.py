"""jackfield serve against another server on one set of weights, in turn.

    PYTHONPATH=tests/conformance python tests/benchmarks/serve_against.py
        [--model demo | half-billion] [--clients 1,8,32] [--rounds 2] [--requests N]
        [--max-tokens 64] [--prompt-tokens N]
        [--serve="--compile native"] [--llama-server PROGRAM] [--dtype float32]

The other is `transformers serve --continuous-batching`, or, where it is given, llama.cpp's, with as
many slots as there are clients at most; both then read one GGUF file, in Q4_0. With `--dtype
float32` both servers compute in it, and the file is of F32: texts are compared rather than times.

Starts one server, asks it with `jackfield bench serve`, ends it, starts the other, and so on: never
two at a time. `half-billion` has Qwen2.5-0.5B's shape, random weights in bfloat16, and a tokenizer
of bytes. Prints for each number of clients the median over the rounds of both and of the ratio, and
how many of four greedy answers are the same text. OMP_NUM_THREADS counts for all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from jackfield.client.prompts import Beginnings
from jackfield.demo import MODEL_PATH

READY_WITHIN = 600.0  # seconds: transformers imports for long where the machine is busy
READY = {"jackfield": "/health/ready", "transformers": "/health", "llama.cpp": "/health"}
Load = dict[str, Any]


def save(model: str, folder: Path) -> None:
    if model == "demo":
        shutil.copytree(MODEL_PATH, folder)
        return
    import torch
    from workload import half_billion

    made = half_billion(torch.bfloat16)
    made.save_pretrained(folder)
    byte_tokenizer(made.config.vocab_size).save_pretrained(folder)


def save_gguf(folder: Path, file: Path, kind: str) -> None:
    """The model of `folder` as llama.cpp's tools would quantize it, without mixing."""
    import torch
    from gguf_files import Type, export
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, keys = PreTrainedTokenizerFast.from_pretrained(folder), {}
    if tokenizer.eos_token_id is None:  # else llama.cpp takes a letter for the end
        keys["tokenizer.ggml.eos_token_id"] = model.config.vocab_size - 2
    export(model, file, Type[kind], tokenizer, **keys)


def byte_tokenizer(size: int) -> Any:
    """One token a byte, and a pair; the ids above are words that no text is cut into."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)}
    words |= {f"Ġw{number}": number for number in range(len(letters), size - 1)} | {"er": size - 1}
    made = Tokenizer(models.BPE(vocab=words, merges=[("e", "r")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def command(server: str, place: Path, port: int, given: argparse.Namespace) -> list[str]:
    if server == "jackfield":
        ours = [sys.executable, "-m", "jackfield", "serve", str(place), "--port", str(port)]
        return [*ours, *(["--dtype", given.dtype] if given.dtype else []), *given.serve.split()]
    if server == "llama.cpp":
        slots = max(map(int, given.clients.split(",")))
        room = slots * ((given.prompt_tokens or 512) + given.max_tokens)
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
        return [
            given.llama_server, "--model", str(place), "--port", str(port), "--parallel",
            str(slots), "--ctx-size", str(room), "--threads", threads, "--no-webui",
            *(("--cache-type-k", "f32", "--cache-type-v", "f32") if given.dtype else ()),
        ]  # fmt: skip
    program = Path(sys.executable).with_name("transformers")
    started = [str(program)] if program.exists() else [
        sys.executable, "-c", "from transformers.cli.transformers import main; main()",
    ]  # fmt: skip
    return [
        *started, "serve", str(place), "--continuous-batching", "--port", str(port),
        "--host", "127.0.0.1", *(["--dtype", given.dtype] if given.dtype else []),
    ]  # fmt: skip


@contextlib.contextmanager
def running(server: str, place: Path, log: Path, given: argparse.Namespace) -> Iterator[str]:
    """A server process until the block is left; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("ab") as out:
        process = subprocess.Popen(command(server, place, port, given), stdout=out, stderr=out)
    try:
        until = time.monotonic() + READY_WITHIN
        while not answers(f"{url}{READY[server]}"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{server} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


def texts(url: str, place: Path) -> list[str]:
    asked = {"model": str(place), "max_tokens": 24, "temperature": 0}
    found = []
    for number in range(4):
        body = {**asked, "prompt": Beginnings(7)(number)}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
        answer.raise_for_status()
        found.append(answer.json()["choices"][0]["text"])
    return found


def measured(url: str, place: Path, given: argparse.Namespace, seed: int) -> dict[int, Load]:
    words = [
        "bench", "serve", "--url", url, "--model", str(place), "--endpoint", "completions",
        "--concurrency", given.clients, "--max-tokens", str(given.max_tokens), "--json",
        "--seed", str(seed),
    ]  # fmt: skip
    words += ["--requests", str(given.requests)] if given.requests else []
    words += ["--prompt-tokens", str(given.prompt_tokens)] if given.prompt_tokens else []
    done = subprocess.run(
        [sys.executable, "-m", "jackfield", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return {load["concurrency"]: load for load in json.loads(done.stdout)["loads"]}


FIGURES = {
    "requests/s": lambda load: load["requests_per_second"],
    "tokens/s": lambda load: load["tokens_per_second"],
    "first token p50, ms": lambda load: 1000 * load["time_to_first_token"]["p50"],
    "first token p95, ms": lambda load: 1000 * load["time_to_first_token"]["p95"],
    "per token p50, ms": lambda load: 1000 * load["time_per_token"]["p50"],
    "per token p95, ms": lambda load: 1000 * load["time_per_token"]["p95"],
}


def show(other_server: str, ours: list[dict[int, Load]], theirs: list[dict[int, Load]]) -> None:
    for clients in ours[0]:
        pairs = [(a[clients], b[clients]) for a, b in zip(ours, theirs, strict=True)]
        failed = [sum(load["failed"] for load in side) for side in zip(*pairs, strict=True)]
        print(f"\n{clients} clients (failed: {failed[0]} and {failed[1]})")
        print(f"{'':22}{'jackfield':>12}{other_server:>14}{'ratio':>8}")
        for name, of in FIGURES.items():
            mine, other = ([of(load) for load in side] for side in zip(*pairs, strict=True))
            better = [
                a / b if name.endswith("/s") else b / a for a, b in zip(mine, other, strict=True)
            ]
            print(
                f"{name:22}{statistics.median(mine):12.4g}{statistics.median(other):14.4g}"
                f"{statistics.median(better):8.2f}"
            )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--model", choices=("demo", "half-billion"), default="demo")
    asked.add_argument("--clients", default="1,8,32")
    asked.add_argument("--rounds", type=int, default=2)
    asked.add_argument("--requests", type=int)
    asked.add_argument("--max-tokens", type=int, default=64)
    asked.add_argument("--prompt-tokens", type=int)
    asked.add_argument("--serve", default="", help="options of jackfield serve, in one argument")
    asked.add_argument("--llama-server", help="the program of llama.cpp")
    asked.add_argument("--dtype", choices=("float32",), help="what both servers compute in")
    given = asked.parse_args()
    other = "llama.cpp" if given.llama_server else "transformers"
    found: dict[str, list[dict[int, Load]]] = {"jackfield": [], other: []}
    said: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as home:
        place = Path(home) / given.model
        save(given.model, place)
        if given.llama_server:
            save_gguf(place, place.with_suffix(".gguf"), "F32" if given.dtype else "Q4_0")
            place = place.with_suffix(".gguf")
        for turn in range(given.rounds):
            for server, loads in found.items():
                log = Path(home) / f"{server}.log"
                with running(server, place, log, given) as url:
                    said[server] = texts(url, place)
                    loads.append(measured(url, place, given, turn))
                rates = [f"{n}: {one['requests_per_second']:.3g}" for n, one in loads[-1].items()]
                print(f"{server}, round {turn}: requests/s {', '.join(rates)}", flush=True)
    same = sum(a == b for a, b in zip(said["jackfield"], said[other], strict=True))
    print(f"{given.model}: {same} of {len(said['jackfield'])} greedy answers are the same text")
    show(other, found["jackfield"], found[other])


if __name__ == "__main__":
    main()

"""What `test_hub_files` has a process of its own do with a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from local_hub import LocalHub, serving


class Caller:
    """Loads models of the hub `hub`, after libraries were told of it."""

    def __init__(self, hub: LocalHub) -> None:
        self.hub = hub

    def make(self, name: str, shards: int = 0) -> Path:
        """The demo model as me/`name`."""
        from jackfield.demo import MODEL_PATH

        folder = self.hub.root / "me" / name
        shutil.copytree(MODEL_PATH, folder)
        if shards:
            in_shards(folder, shards)
        return folder

    def load(self, model: str | Path) -> dict[str, Any]:
        """The tokens of a model or its error; the bytes that were sent of each file of weights."""
        import jackfield

        self.hub.forget()
        found: dict[str, Any] = {}
        try:
            with jackfield.load(model, attn_implementation="eager") as engine:
                (done,) = engine.generate([[5, 6, 7, 8]], max_new_tokens=4)
                found["tokens"] = done.token_ids
                found["of a text"] = of_a_text(engine)
        except jackfield.JackfieldError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        sent = [[path.rpartition("/")[2], size] for _, path, size in self.hub.asked if size]
        found["sent"] = [part for part in sent if part[0].endswith(".safetensors")]
        found["asked"] = len(self.hub.asked)
        return found

    def make_bare(self, name: str, *kept: str) -> Path:
        """The demo model as me/`name` without what makes its tokenizer, but for `kept`."""
        folder = self.make(name)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if file not in kept:
                (folder / file).unlink()
        return folder

    def cached(self, name: str, file: str) -> Path:
        """A file of me/`name` in the cache."""
        from huggingface_hub import constants

        (folder,) = Path(constants.HF_HUB_CACHE).glob(f"models--me--{name}/snapshots/*")
        return folder / file

    def marks(self, name: str, file: str) -> list[Path]:
        """What says in the cache that me/`name` has no such file."""
        from huggingface_hub import constants

        return [*Path(constants.HF_HUB_CACHE).glob(f"models--me--{name}/.no_exist/*/{file}")]


def of_a_text(engine: Any) -> Any:
    """The tokens after a text, or what is said of one."""
    from jackfield.errors import PromptError

    try:
        return engine.generate(["A sentence."], max_new_tokens=4)[0].token_ids
    except PromptError as error:
        return str(error)


def in_shards(folder: Path, count: int) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number in range(count):
        part = {name: tensors[name].contiguous() for name in names[number::count]}
        save_file(part, folder / f"part-{number}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(part, f"part-{number}.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """What a file of weights may be that is not worth fetching."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    first = next(name for name in header if name != "__metadata__")

    def changed(**more: Any) -> bytes:
        text = json.dumps({**header, first: {**header[first], **more}}).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    deep = b"[" * 200_000
    yield "cut", whole[:-1000]
    yield "longer", whole + bytes(10)
    yield "four bytes", b"abcd"
    yield "long header", (1 << 40).to_bytes(8, "little") + whole[8:]
    yield "deep header", len(deep).to_bytes(8, "little") + deep + bytes(9)
    yield "other shape", changed(shape=[1])
    yield "odd dtype", changed(dtype="X7")
    yield "no offsets", changed(data_offsets=None)
    shape = header[first]["shape"]
    yield "whole numbers", changed(dtype="I16", shape=shape)


def be(caller: Caller) -> dict[str, Any]:
    from huggingface_hub import constants

    hub, found = caller.hub, {}
    folder = caller.make("whole")
    found["folder"] = caller.load(folder)
    found["whole"] = caller.load("me/whole")
    found["again"] = caller.load("me/whole")
    caller.make("parts", shards=3)
    found["parts"] = caller.load("me/parts")
    caller.cached("parts", "part-1.safetensors").resolve().unlink()
    found["one part"] = caller.load("me/parts")
    hub.ranges = False
    caller.make("plain", shards=3)
    found["no ranges"] = caller.load("me/plain")
    hub.ranges = True
    whole = (folder / "model.safetensors").read_bytes()
    for number, (what, content) in enumerate(damaged(whole)):
        (caller.make(f"bad{number}") / "model.safetensors").write_bytes(content)
        found[what] = caller.load(f"me/bad{number}")
    bare = caller.make_bare("bare")
    found["bare folder"], found["bare"] = caller.load(bare), caller.load("me/bare")
    found["bare again"] = caller.load("me/bare")
    caller.make_bare("half", "tokenizer_config.json")
    found["half"] = caller.load("me/half")
    caller.make_bare("unsure")
    caller.load("me/unsure")
    for mark in caller.marks("unsure", "tokenizer.json"):
        mark.unlink()
    constants.HF_HUB_OFFLINE = True
    found["bare, offline"] = caller.load("me/bare")
    found["unsure, offline"] = caller.load("me/unsure")
    folder = caller.cached("unsure", "config.json").parent
    found["unsure folder, offline"] = caller.load(folder)
    found["offline"] = caller.load("me/whole")
    caller.cached("parts", "part-2.safetensors").resolve().unlink()
    found["offline, a part"] = caller.load("me/parts")
    cached = caller.cached("whole", "model.safetensors").resolve()
    os.truncate(cached, len(whole) - 4)
    found["offline, cut"] = caller.load("me/whole")
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with serving(root / "hub") as served:
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"):
            os.environ.pop(name, None)
        os.environ |= {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(root / "home")}
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        told = be(Caller(served))
    (root / "told.json").write_text(json.dumps(told))

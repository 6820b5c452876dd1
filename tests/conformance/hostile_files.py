"""Files of a model's folder as a stranger may write them: one `Attack` each, named for a report."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "here goes the value"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"

#: JSON for the value of a field: wrong types, numbers out of range, texts that harm a terminal.
VALUES = {
    "null": "null",
    "text": '"x"',
    "empty text": '""',
    "negative": "-1",
    "zero": "0",
    "fraction": "1.5",
    "true": "true",
    "list": "[]",
    "list of null": "[null]",
    "object": "{}",
    "object in objects": '{"a": {"b": {"c": null}}}',
    "digits": "9" * 30,
    "NaN": "NaN",
    "infinity": "1e999",
    "half a surrogate pair": '"\\ud800"',
    "control characters": '"\\u001b[31m\\n\\u0000\\u202e"',
    "100,000 characters": json.dumps("x" * 100_000),
    "50 levels": "[" * 50 + "]" * 50,
}


@dataclass(frozen=True)
class Attack:
    """What is done to one `file` of a folder."""

    file: str
    what: str
    act: Callable[[Path], None]

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def writes(content: bytes | str) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: void(path.write_bytes(data))


def void(_: object) -> None:
    pass


def remade(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something of another kind in place of the file."""

    def act(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return act


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's own path may not be long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


KINDS = {
    "a folder": remade(os.mkdir),
    "a pipe": remade(os.mkfifo),
    "a socket": remade(_socket),
    "a link to nothing": remade(lambda path: path.symlink_to("nothing")),
    "a link to itself": remade(lambda path: path.symlink_to(path.name)),
    "a link to /dev/zero": remade(lambda path: path.symlink_to("/dev/zero")),
    "a link to its folder": remade(lambda path: path.symlink_to(".")),
}


def any_json(path: Path) -> Iterator[Attack]:
    """What may happen to any file of JSON, whatever it is for."""
    text, name = path.read_text(), path.name
    inner = text.strip()[1:-1].strip()  # without the braces
    deep = 100_000
    contents: dict[str, bytes | str] = {
        "empty": "",
        "spaces": "   \n",
        "null": "null",
        "a list": "[]",
        "a number": "17",
        "a text": '"x"',
        "zeros": bytes(100),
        "UTF-16": text.encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "bytes of no text": b'{"\xff": "\xfe"}',
        "half of it": text[: len(text) // 2],
        "more behind it": text + "}",
        "two of it": text + text,
        "100,000 lists": "[" * deep + "]" * deep,
        "100,000 objects": '{"a":' * deep + "1" + "}" * deep,
        "100,000 lists in a field": '{"deep": ' + "[" * deep + "]" * deep + f", {inner}}}",
        "150 lists in a field": '{"deep": ' + "[" * 150 + "]" * 150 + f", {inner}}}",
        "100,000 lists that do not end": '{"a": ' + "[" * deep,
        "17 megabytes of spaces": " " * (17 << 20) + text,
        "a field of a megabyte": '{"much": "' + "x" * (1 << 20) + f'", {inner}}}',
        "20,000 fields": "{" + "".join(f'"f{i}": 0, ' for i in range(20_000)) + inner + "}",
        "every field twice": f"{{{inner}, {inner}}}",
        "5,000 digits": '{"digits": ' + "9" * 5000 + f", {inner}}}",
        "a key of half a pair": f'{{"\\udc80": 1, {inner}}}',
        "a key of control characters": f'{{"\\u001b[2J\\n": 1, {inner}}}',
        "an empty key": f'{{"": 1, {inner}}}',
        "comments": "// one\n" + text,
        "no object's end": text.rstrip()[:-1],
    }
    for what, content in contents.items():
        yield Attack(name, what, writes(content))
    for what, act in KINDS.items():
        yield Attack(name, what, act)


def _places(data: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """The way to every value in `data` down to a depth."""
    pairs = data.items() if isinstance(data, dict) else list(enumerate(data))[:2]
    for key, value in pairs:
        yield (key,)
        if depth > 1 and isinstance(value, dict | list):
            yield from ((key, *rest) for rest in _places(value, depth - 1))


def fields(path: Path, more: Iterable[str] = (), depth: int = 1) -> Iterator[Attack]:
    """Every field of a file of JSON, and `more` that it could have, with each of `VALUES`."""
    data = json.loads(path.read_text())
    for place in (*_places(data, depth), *((name,) for name in more)):
        changed = json.loads(json.dumps(data))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = MARK
        text, named = json.dumps(changed), ".".join(map(str, place))
        for what, value in VALUES.items():
            content = text.replace(json.dumps(MARK), value)
            yield Attack(path.name, f"{named} is {what}", writes(content))


def _with_header(header: bytes | dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def weights(path: Path) -> Iterator[Attack]:
    """Headers that lie, in every number of one tensor's entry, and files that are none."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    first, second = names[:2]
    contents = {f"cut off at {n}": whole[:n] for n in (0, 1, 7, 8, 9, 8 + length, len(whole) - 1)}
    for n in (1 << 63, (1 << 64) - 1, len(whole), len(whole) - 8, length - 1, length + 1, 0, 2):
        contents[f"a header of {n} bytes"] = struct.pack("<Q", n) + whole[8:]
    for what, text in {
        "100,000 lists": b"[" * 100_000,
        "100,000 objects": b'{"a":' * 100_000,
        "no object": b"[]",
        "no tensors": b"{}",
        "bytes of no text": b'{"\xff": 1}',
        "half a pair": b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
        "nothing": b"",
    }.items():
        contents[f"a header with {what}"] = _with_header(text, data)
    many = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    contents["20,000 empty tensors more"] = _with_header(many | header, data)
    contents["a byte more"] = whole + b"\0"
    for what, entry in {
        "has no entry": None, "is a list": [], "is empty": {}, "is text": "x",
        "has no dtype": {"dtype": None}, "has a dtype of its own": {"dtype": "F31"},
        "has another dtype": {"dtype": "F64"}, "has a list as dtype": {"dtype": []},
        "has a shape of text": {"shape": "xx"}, "has no shape": {"shape": None},
        "has a negative size": {"shape": [-1, -1]}, "has a size of 2^70": {"shape": [2**70, 0]},
        "has a fraction of a size": {"shape": [1.5]}, "has true as size": {"shape": [True]},
        "has another shape": {"shape": [1]}, "has 10,000 dimensions": {"shape": [1] * 10_000},
        "has one offset": {"data_offsets": [0]}, "has no offsets": {"data_offsets": None},
        "ends before it begins": {"data_offsets": [8, 0]},
        "begins below zero": {"data_offsets": [-8, 0]},
        "ends beyond the file": {"data_offsets": [0, 2**62]},
        "has the bytes of another": {"data_offsets": header[second]["data_offsets"]},
        "has more": {"more": {"a": []}},
    }.items():  # fmt: skip
        changed = dict(header)
        changed[first] = {**header[first], **entry} if isinstance(entry, dict) and entry else entry
        contents[f"a tensor {what}"] = _with_header(changed, data)
    gap = dict(header)
    del gap[first]
    contents["a tensor less"] = _with_header(gap, data)
    renamed = {("\x1b[31m\n" + name if name == first else name): e for name, e in header.items()}
    contents["a tensor with another name"] = _with_header(renamed, data)
    for what, content in contents.items():
        yield Attack(path.name, what, writes(content))
    for what, act in KINDS.items():
        yield Attack(path.name, what, act)


def split(folder: Path) -> None:
    """Put the weights of `folder` into two files and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, places = sorted(tensors), {}
    for at, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{at}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def shards(path: Path, outside: Path) -> Iterator[Attack]:
    """An index that names other files; `outside` is a whole file of weights elsewhere."""
    data = json.loads(path.read_text())
    places = data["weight_map"]
    first, shard = next(iter(places.items()))
    names: dict[str, Any] = {
        "5,000 characters": "x" * 5000 + ".safetensors",
        "an absolute path": str(outside),
        "a path upwards": os.path.relpath(outside, path.parent),
        "a path down and up": f"below/../../{outside.name}",
        "a path with a dot": f"./{shard}",
        "backslashes": f"..\\{outside.name}",
        "a drive": "C:/model.safetensors",
        "an address": "https://host/model.safetensors",
        "a pickle": "model.bin",
        "a zero byte": "x\0.safetensors",
        "a line end": "x\n.safetensors",
        "half a pair": "\ud800.safetensors",
        "an escape": "\x1b[2J.safetensors",
        "nothing": "",
        "a dot": ".",
        "the folder": "../" + path.parent.name,
        "a number": 3, "null": None, "a list": [shard], "an object": {}, "true": True,
        "a missing file": "missing.safetensors",
        "the other file": next(name for name in places.values() if name != shard),
        "a home": "~/model.safetensors",
    }  # fmt: skip
    for what, name in names.items():
        one = {**data, "weight_map": {**places, first: name}}
        yield Attack(path.name, f"one tensor in {what}", writes(json.dumps(one)))
        every = {**data, "weight_map": dict.fromkeys(places, name)}
        yield Attack(path.name, f"all tensors in {what}", writes(json.dumps(every)))
    for what, value in VALUES.items():
        text = json.dumps({**data, "weight_map": "here"}).replace('"here"', value)
        yield Attack(path.name, f"weight_map is {what}", writes(text))
    less = {name: place for name, place in places.items() if name != first}
    yield Attack(path.name, "a tensor less", writes(json.dumps({**data, "weight_map": less})))
    more = {**places, "more": shard}
    yield Attack(path.name, "a tensor more", writes(json.dumps({**data, "weight_map": more})))
    many = {**places, **dict.fromkeys(map(str, range(200_000)), shard)}
    yield Attack(path.name, "200,000 more", writes(json.dumps({**data, "weight_map": many})))
    yield Attack(shard, "a link out of the folder", lambda file: _link_out(file, outside.parent))


def _link_out(file: Path, elsewhere: Path) -> None:
    """As the hub's cache has it; what is read is right."""
    shutil.move(file, elsewhere / "blob")
    file.symlink_to(elsewhere / "blob")

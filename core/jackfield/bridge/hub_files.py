"""A hub model's files of weights: looked at in the hub's cache, or there by their headers, and
fetched.

Nothing is asked of the network where all files are in the cache, or HF_HUB_OFFLINE is set.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jackfield.bridge.headers import (
    INDEX,
    MOST,
    WHOLE,
    BrokenError,
    laid_out,
    named_weights,
    safetensors_header,
    shards,
    stored,
)
from jackfield.contracts.checkpoint import StoredTensor, Tensors
from jackfield.errors import CheckpointError, error_text
from jackfield.foreign import parsed

logger = logging.getLogger("jackfield")

_START = 100_000  # bytes that are asked for first: nearly all headers are shorter
_AT_ONCE = 8


def cached_folder(location: str, revision: str | None) -> Path | None:
    """The folder of the hub's cache in which the config is that was read last; named by its commit.

    None: there is none, as for what is no hub id.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(location, "config.json", revision=revision)
    except (HFValidationError, OSError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def is_whole(folder: Path, named: object) -> bool:
    """Whether all files of weights are in `folder`. Raises CheckpointError for a broken index."""
    first = next((name for name in _names(folder, named) if (folder / name).is_file()), None)
    return first is not None and not _missing(folder, first)


def fetch(
    location: str, folder: Path, named: object, check: Callable[[Tensors], None]
) -> Path | None:
    """Have the weights of the model `location` in `folder`, its commit's part of the hub's cache.

    What is not there is fetched, after `check` has seen every tensor by its header; the files come
    from that commit, whatever was pushed meanwhile. `named` is the file that the config names, if
    it does. None: what is there is for transformers to say. Raises CheckpointError.
    """
    from huggingface_hub import constants

    first = _first(location, folder, named, offline=constants.HF_HUB_OFFLINE)
    if first is None:
        return None
    if not (missing := _missing(folder, first)):
        return folder
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"the hub's cache has no {missing[0]} of {location}, and HF_HUB_OFFLINE is set; fetch "
            "it once with a network"
        )
    check(_headers(location, folder, _files(folder, first)))
    from huggingface_hub import snapshot_download

    snapshot_download(location, revision=folder.name, allow_patterns=missing)
    return folder


def fetch_first(location: str, folder: Path, names: Sequence[str]) -> bool:
    """Whether the model `location` has one of the files `names`; the first that it has is fetched.

    `folder` is its commit's part of the hub's cache, which remembers what the hub does not have.
    Raises CheckpointError where the cache cannot say, and the hub is not asked or does not answer.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    known = {n: try_to_load_from_cache(location, n, revision=folder.name) for n in names}
    if any(isinstance(path, str) for path in known.values()):
        return True
    for name in [name for name, path in known.items() if path is None]:
        try:
            hf_hub_download(location, name, revision=folder.name)
        except LocalEntryNotFoundError as error:
            offline = constants.HF_HUB_OFFLINE
            why = "HF_HUB_OFFLINE is set" if offline else "the hub does not answer"
            raise CheckpointError(
                f"the hub's cache does not say whether {location} has a {name}, and {why}; load it "
                f"once with a network, or load the folder {folder} as it is"
            ) from error
        except EntryNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(
                f"cannot fetch {name} of {location}: {error_text(error)}"
            ) from error
        return True
    return False


def _names(folder: Path, named: object) -> list[str]:
    """What weights may be in, or the index of it."""
    return [WHOLE, INDEX] if named is None else [named_weights(named, folder / "config.json")]


def _files(folder: Path, first: str) -> list[str]:
    return shards(folder / first) if first.endswith(".index.json") else [first]


def _missing(folder: Path, first: str) -> list[str]:
    return [name for name in _files(folder, first) if not (folder / name).is_file()]


def _first(location: str, folder: Path, named: object, *, offline: bool) -> str | None:
    """The file that weights are read from, or their index, which is fetched."""
    names = _names(folder, named)
    for name in names:
        if (folder / name).is_file():
            return name
    if offline:
        return None
    from huggingface_hub import HfApi, hf_hub_download

    for name in names:
        if HfApi().file_exists(location, name, revision=folder.name):
            if name.endswith(".index.json"):
                hf_hub_download(location, name, revision=folder.name)
            return name
    return None


def _headers(location: str, folder: Path, names: list[str]) -> dict[str, StoredTensor]:
    """Every tensor in these files, of the cache or else of the hub.

    None where the hub withholds a header: what a tensor has to be may depend on other files.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda name: _header(location, folder, name), names))
    every = [part for part in found if part is not None]
    if len(every) < len(found):
        return {}
    return {tensor: entry for part in every for tensor, entry in part.items()}


def _header(location: str, folder: Path, name: str) -> dict[str, StoredTensor] | None:
    origin, file = f"{name} of {location}", folder / name
    if file.is_file():
        return stored(safetensors_header(file), file)
    try:
        size, content = _beginning(location, folder.name, name)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - of whichever library speaks HTTP
        logger.info(
            "the header of %s is not read before it is fetched: %s", origin, error_text(error)
        )
        return None
    try:
        header = laid_out(parsed(content, f"the header of {origin}"), 8 + len(content), size)
    except BrokenError as error:
        raise CheckpointError(f"{origin} on the hub {error}; it has to be mended there") from None
    return stored(header, file)


def _beginning(location: str, revision: str, name: str) -> tuple[int, bytes]:
    """The size of a file of the hub, and its header. Raises CheckpointError, HTTP's own errors."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(location, name, revision=revision)
    size, content = part(url, 0, min(_START, MOST))
    if len(content) < 8:
        raise CheckpointError(f"{name} of {location} on the hub has {len(content)} bytes")
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(size, MOST):
        raise CheckpointError(
            f"{name} of {location} on the hub is not a safetensors file (a header of {length:,} "
            f"bytes in a file of {size:,})"
        )
    if 8 + length > len(content):
        size, content = part(url, 0, 8 + length)
    return size, content[8 : 8 + length]


def part(url: str, start: int, end: int) -> tuple[int, bytes]:
    """The size of what is at `url`, and its bytes from `start` to before `end`.

    Raises ValueError where the server would send all of it.
    """
    from huggingface_hub import constants, get_session, utils

    library: Any = utils  # what is documented of it is in no __all__
    asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    headers = library.build_hf_headers() | asked
    wait = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=wait) as answer:
        library.hf_raise_for_status(answer)
        _, _, size = answer.headers.get("Content-Range", "").rpartition("/")
        if answer.status_code != 206 or not size.isdecimal():
            raise ValueError("the server sends whole files only")
        content = b""
        for part in answer.iter_bytes():
            content += part
            if len(content) >= end - start:
                break
        return int(size), content[: end - start]

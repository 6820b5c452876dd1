"""Headers of GGUF files on the hub, looked at before gigabytes are fetched."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jackfield.bridge.gguf_header import has_header, read_header
from jackfield.bridge.gguf_rope import DIVISORS
from jackfield.bridge.hub_files import part
from jackfield.errors import CheckpointError, error_text

logger = logging.getLogger("jackfield")

_START = 1 << 22  # bytes that are asked for first: a vocabulary of 100,000 takes some of them


def look_first(
    repository: str,
    names: Sequence[str],
    revision: str | None,
    check: Callable[[Sequence[Path]], object],
) -> None:
    """Have `check` look at files that have the headers of these of the hub, and zeros for weights.

    Nothing is done where the cache has them, HF_HUB_OFFLINE is set, or the hub sends no parts of
    files. Raises CheckpointError.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    cached = (try_to_load_from_cache(repository, name, revision=revision) for name in names)
    if constants.HF_HUB_OFFLINE or all(isinstance(found, str) for found in cached):
        return
    with tempfile.TemporaryDirectory(prefix="jackfield-gguf-") as folder:
        try:
            paths = [_beginning(repository, name, revision, Path(folder)) for name in names]
        except CheckpointError as error:
            raise _of_the_hub(error, folder, repository) from None
        except Exception as error:  # noqa: BLE001 - of whichever library speaks HTTP
            logger.info(
                "the header of %s/%s is not read before it is fetched: %s",
                repository, names[0], error_text(error),
            )  # fmt: skip
            return
        try:
            check(paths)
        except CheckpointError as error:
            raise _of_the_hub(error, folder, repository) from None


def _beginning(repository: str, name: str, revision: str | None, folder: Path) -> Path:
    """A file as long as that of the hub, with its header. Raises HTTP's errors, CheckpointError."""
    from huggingface_hub import hf_hub_url

    url, path = hf_hub_url(repository, name, revision=revision), folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    size, asked = _START, _START
    while True:
        size, content = part(url, 0, asked)
        path.write_bytes(content)
        if asked >= size or has_header(path):
            break
        asked *= 4
    with path.open("r+b") as file:
        file.truncate(size)  # of zeros, which take no room
        divisors = read_header(path).tensors.get(DIVISORS)  # a part of the config
        if divisors is not None:
            start = divisors.start
            file.seek(start)
            file.write(part(url, start, start + divisors.nbytes)[1])
    return path


def _of_the_hub(error: CheckpointError, folder: str, repository: str) -> CheckpointError:
    return CheckpointError(str(error).replace(f"{folder}/", f"{repository}/"))

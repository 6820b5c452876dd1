"""What `test_gguf_files` has a process of its own do with a hub on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def main(demo: Path, folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
    from local_hub import serving

    (folder / "hub/me/model/sub").mkdir(parents=True)
    shutil.copy(demo, folder / "hub/me/model/sub/demo.gguf")
    for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"):
        os.environ.pop(name, None)  # each would be asked before HF_HOME
    with serving(folder / "hub") as hub:
        os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "cache")}
        os.environ["HF_HUB_OFFLINE"] = "0"
        import jackfield
        from jackfield.bridge import gguf_on_the_hub

        texts, asked = [], []
        for place in (demo, "me/model/sub/demo.gguf", "me/model/sub/demo.gguf"):
            hub.forget()
            with jackfield.load(place) as engine:
                texts.append(engine.generate("Sort: 41 7 88")[0].text)
            asked.append(hub.sent("demo.gguf"))
        size = demo.stat().st_size
        odd = folder / "hub/me/model/odd.gguf"
        odd.write_bytes(demo.read_bytes()[: size - 5000])
        gguf_on_the_hub._START = 1 << 12  # so that the header is longer
        hub.forget()
        try:
            jackfield.plan("me/model/odd.gguf")
        except jackfield.JackfieldError as error:
            told = str(error)
        sent = hub.sent("odd.gguf")
    assert told.startswith("me/model/odd.gguf is not a whole GGUF file"), told
    assert 0 < sent < size / 4, (sent, size)
    assert asked[0] == asked[2] == 0, asked
    assert size < asked[1] <= size + (1 << 22), asked
    assert len(set(texts)) == 1, texts


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

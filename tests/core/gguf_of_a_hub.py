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

        texts, asked = [], []
        for place in (demo, "me/model/sub/demo.gguf", "me/model/sub/demo.gguf"):
            hub.forget()
            with jackfield.load(place) as engine:
                texts.append(engine.generate("Sort: 41 7 88")[0].text)
            asked.append(hub.sent("demo.gguf"))
    assert asked == [0, demo.stat().st_size, 0], asked
    assert len(set(texts)) == 1, texts


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

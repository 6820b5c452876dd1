"""What replicas are told of a server's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.replicas.asked import anywhere
from jackfield.serving.settings import ModelSettings, ServerSettings

if TYPE_CHECKING:
    import pytest


def test_every_folder_is_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas run in folders of their own; what is no folder here may be one of the hub."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "fr", "offload"):
        Path(name).mkdir()
    given = {"adapters": {"fr": "fr", "de": "owner/de"}, "adapter": "fr",
             "offload_folder": "offload", "assistant_model": "model"}  # fmt: skip
    asked = ServerSettings(models={"m": ModelSettings.model_validate({"model": "model", **given})})
    (found,) = anywhere(asked).models.values()
    assert found.model == str(tmp_path / "model")
    assert found.arguments == {
        "adapters": {"fr": str(tmp_path / "fr"), "de": "owner/de"},
        "adapter": str(tmp_path / "fr"),
        "offload_folder": str(tmp_path / "offload"),
        "assistant_model": str(tmp_path / "model"),
    }

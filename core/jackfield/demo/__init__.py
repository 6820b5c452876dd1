"""The small model inside the package: where its two folders are, and nothing heavy."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DRAFT_PATH", "MODEL_PATH"]

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""Folder of the demo model: plain `from_pretrained(MODEL_PATH)` loads it."""

DRAFT_PATH: Path = Path(__file__).resolve().parent / "draft"
"""Folder of the draft model, which shares the demo model's tokenizer."""

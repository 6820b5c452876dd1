"""Set before any test imports a library that reads them; subprocesses inherit them."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only wait for each other

import torch

if not torch.cuda.is_available():
    # Read when Triton is imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

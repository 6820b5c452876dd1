"""Triton reads it once, when it is imported: its kernels run in Python where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

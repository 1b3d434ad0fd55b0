"""Without a GPU, Triton kernels run in the interpreter. It is chosen when triton is imported: before any test is."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

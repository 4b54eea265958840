"""The numerics every reference runs under: what the equations mean on any device."""

import torch


def set_numerics() -> None:
    """Set the process-wide switches the references are defined under.

    FP32 matrix products stay FP32 (no TF32: a TF32 router picks other experts) and BF16 products
    accumulate in FP32 to the end (PyTorch lets cuBLAS sum split-K partials in BF16 by default).
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

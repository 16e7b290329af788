"""Dtypes that a precision stands for."""

import torch

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def parameter_dtype(precision: str) -> torch.dtype:
    """Dtype of parameters and input; autocast makes the rest of it."""
    return torch.float64 if precision == "float64" else torch.float32

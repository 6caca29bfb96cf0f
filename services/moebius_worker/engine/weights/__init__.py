"""Reads the weights of a checkpoint, whatever its container, under Hugging Face's names."""

from .load import load_weights
from .open import open_weights
from .reader import TensorInfo, WeightReader

__all__ = ["TensorInfo", "WeightReader", "load_weights", "open_weights"]

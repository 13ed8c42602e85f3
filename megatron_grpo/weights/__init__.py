"""Weights in and out: Hugging Face directories <-> the live Megatron model -> the inference engines."""

from .export import iterate_hf_tensors
from .live import LiveModel, ModelGroups
from .load import load_hf_checkpoint
from .safetensors_dir import has_weights
from .save import save_hf_checkpoint

__all__ = ["LiveModel", "ModelGroups", "has_weights", "iterate_hf_tensors", "load_hf_checkpoint", "save_hf_checkpoint"]

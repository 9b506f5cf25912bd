"""Distillation and quantization."""

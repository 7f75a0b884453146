"""Benchmarks, with checkpoints of published geometries and random weights, as safetensors and as GGUF."""

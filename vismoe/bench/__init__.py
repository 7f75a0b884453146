"""Benchmarks: checkpoints of any published geometry with random weights, as safetensors and as GGUF."""

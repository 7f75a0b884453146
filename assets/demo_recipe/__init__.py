"""The parts of the demo model's training: its files, its training batches, and fast network functions."""

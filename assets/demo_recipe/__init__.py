"""What the demo model is made of: its files, its training batches, and the fast network functions of its training."""

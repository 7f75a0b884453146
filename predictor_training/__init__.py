"""Training of learned lookaheads from recorded traces. Nothing is trained in this version; traces are recorded already."""

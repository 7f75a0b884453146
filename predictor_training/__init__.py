"""Learned lookaheads: collects prompts as traces, trains networks on them, evaluates these on unseen prompts, installs them."""

"""Drafts: tokens guessed ahead of the model, which verifies several in one pass. What is pure: no model, thread or clock."""

"""Learned lookaheads: prompts are collected as traces, networks trained from them, judged on what they never saw, and
installed.
"""

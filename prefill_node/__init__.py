"""Prefill node: prompts in, KV blocks and the first token out."""

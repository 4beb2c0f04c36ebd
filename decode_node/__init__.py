"""Decode node: KV blocks in, tokens out."""

"""Measures: load from outside, engines side by side, tokens against transformers, kernels and nodes alone."""

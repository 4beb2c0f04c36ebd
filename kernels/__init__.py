"""Everything that computes on the device; `kernels.ops` is the only door."""

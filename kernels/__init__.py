"""Everything that computes on the device: `ops` for any model in torch, `cpu_decoder` compiled, `triton_*` for GPUs."""

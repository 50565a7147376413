"""Fast bodies for the fused operations: raw arrays in, raw arrays out; they know no Tensor."""

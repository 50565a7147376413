"""NumPy kernels: plain formulas on blocks of rows that fit the cache, shared among threads.

Legend: B batch, T query positions, S key positions, H heads, D head width, C model width,
V vocabulary, N rows, ``(*S)`` any shape. A result has its input's dtype; float16 is computed in
float32. Inputs may have any strides and are never written, but for what
`adamw` updates.
"""

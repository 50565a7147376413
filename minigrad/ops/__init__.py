"""The ops, each one block: docstring with the formula, forward, rules, samples.

Legend for shapes: B batch, T query positions, S key positions, H heads, D head width, C model width, V vocabulary,
(*S) any shape. In a rule, `ct` is the cotangent of the output, `y` the output; see the top of `tape.py`.
"""

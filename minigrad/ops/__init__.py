"""The ops, each one block: docstring with the formula, forward, rules, samples.

Legend for shapes: B batch, T query positions, S key positions, H heads, D head width, C model width, V vocabulary,
(*S) any shape. In a rule, `ct` is the cotangent of the output, `y` the output; see the top of `tape.py`.

A docstring begins "FORMULA;  RULE" (two spaces); a blank line ends it. RULE is "ct_a = ...,  ct_b = ...", a part for
each argument that has a derivative, after "with g = ...," if they share a piece; or "no gradient". An equation's number
is in brackets: (A.10.7). The tape prints and explains itself by these.
"""

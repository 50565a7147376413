"""Exercise 3: the matrix product y = a @ b. This one rule is most of what a Transformer does on its way back.

    a (n, k),  b (k, m),  y (n, m),      y_ij = sum over r of a_ir b_rj

The recipe, dL = <ct, dy>:

    1. dy = da @ b + a @ db
    2. dL = <ct, da @ b> + <ct, a @ db>
    3. For matrices <u, v> is the trace of u^T v, and a trace does not change when its factors go round in a circle:
       tr(x y z) = tr(y z x) = tr(z x y). So a matrix moves to the other side of <,> as its transpose:

           <u, v w> = <u w^T, v> = <v^T u, w>

       Use it once for da and once for db. Or do it with indices: dL = sum over i, j, r of ct_ij da_ir b_rj; what is
       multiplied with da_ir, once the sum over j is done?

Check the shapes at the end: ct_a must be (n, k) and ct_b (k, m). With n, k and m all different only one product fits
each, which is a good memory aid, but not a proof: for square matrices every wrong one fits as well.

    ct (n, m)   returns (ct_a (n, k), ct_b (k, m))

Appendix A.10 uses this rule in (A.10.5), (A.10.6), (A.10.8), (A.10.9) and (A.10.11).
"""


def matmul(a, b):
    return a @ b


def matmul_vjp(ct, a, b):
    """(ct_a, ct_b) for y = a @ b"""
    # [yours]
    return ct @ b.T, a.T @ ct
    # [end]


# Hint: <ct, da @ b> = <ct @ b.T, da>.

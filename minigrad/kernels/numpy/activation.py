"""GELU, SiLU and the error function: elementwise, any shape (*S)."""

import math

import numpy as np

from .blocks import by_blocks

# u = k (x + a x^3) of the tanh approximation of GELU
TANH_K, TANH_A = math.sqrt(2 / math.pi), 0.044715


def gelu(x, approximate):
    """y = x Phi(x), Phi(x) = (1 + erf(x / sqrt 2)) / 2, for ``approximate="none"``.

    ``approximate="tanh"``: Phi(x) = (1 + tanh u) / 2, u = k (x + a x^3). This is 1 / (1 + e^-2u),
    and NumPy's exp takes half the time of its tanh.  x, y (*S).
    """
    def exact(x, y, t, p):
        _phi_block(x, y, t, p)
        y *= x

    def tanh(x, y):
        np.multiply(x, x, out=y)
        _one_plus_exp(x, y)
        np.divide(x, y, out=y)

    return _elementwise(tanh, x) if approximate == "tanh" else _elementwise(exact, x, temps=2)


def gelu_backward(ct, x, approximate):
    """ct_x = ct (Phi(x) + x Phi'(x)): Phi' = exp(-x^2 / 2) / sqrt(2 pi), or for the tanh form
    Phi' = Phi (1 - Phi) 2 u', u' = k (1 + 3 a x^2).  ct, x, ct_x (*S).
    """
    def exact(ct, x, y, t, p):
        _phi_block(x, y, t, p)
        np.multiply(x, x, out=t)
        t *= -0.5
        np.exp(t, out=t)
        t *= x
        t *= 1 / math.sqrt(2 * math.pi)
        y += t
        y *= ct

    def tanh(ct, x, y, t, p):
        np.multiply(x, x, out=t)
        np.copyto(y, t)
        _one_plus_exp(x, y)
        np.divide(1, y, out=y)  # Phi
        t *= 6 * TANH_K * TANH_A
        t += 2 * TANH_K
        np.subtract(1, y, out=p)
        p *= y
        t *= p  # before x: a large x^3 would make NaN of Phi (1 - Phi) = 0
        t *= x
        y += t
        y *= ct

    return _elementwise(tanh if approximate == "tanh" else exact, ct, x, temps=2)


def silu(x):
    """y = x / (1 + exp(-x)).  x, y (*S)."""
    def body(x, y):
        np.negative(x, out=y)
        np.exp(y, out=y)
        y += 1
        np.divide(x, y, out=y)

    return _elementwise(body, x)


def silu_backward(ct, x):
    """ct_x = ct s (1 + x (1 - s)), s = 1 / (1 + exp(-x)).  ct, x, ct_x (*S)."""
    def body(ct, x, y, t):
        np.negative(x, out=y)
        np.exp(y, out=y)
        y += 1
        np.divide(1, y, out=y)
        np.subtract(1, y, out=t)
        t *= x
        t += 1
        y *= t
        y *= ct

    return _elementwise(body, ct, x, temps=1)


def erf(x):
    """erf(x) = 2 / sqrt(pi) integral_0^x exp(-t^2) dt.  x, y (*S).

    Relative error below 1e-15 in float64, 3 units in the last place in float32.
    """
    return _elementwise(_erf_block, x, temps=2)


def _one_plus_exp(x, y):
    """From y = x^2 make y = 1 + exp(-2 u), in place."""
    y *= -2 * TANH_K * TANH_A
    y += -2 * TANH_K
    y *= x
    np.exp(y, out=y)
    y += 1


# float32: erf x = x P(x^2) / Q(x^2), the odd rational function of Eigen's generic_fast_erf_float
# and XLA's ErfImpl32. ERF32_END is the first float32 where this is exactly 1 (all were tried).
ERF32_END = 3.637730360031128
ERF32_P = (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861,
           0.18520832239976145, 1.128379143519084)
ERF32_Q = (-1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885,
           0.014070470171167667, 0.11098505178285362, 0.49746925110067538, 1.0)
# The same for erf(x / sqrt 2) / 2: the scaling is done once, in the coefficients of x^9 ... x and
# x^12 ... 1, and not in each block. PHI32_END is where it is exactly 1/2: so gelu(-100) is 0.
PHI32_END = 5.215662479400635
PHI32_P = tuple(c * 0.5 ** (i + 1.5) for c, i in zip(ERF32_P, (4, 3, 2, 1, 0), strict=True))
PHI32_Q = tuple(c * 0.5**i for c, i in zip(ERF32_Q, (6, 5, 4, 3, 2, 1, 0), strict=True))

# float64: S. Moshier's Cephes library, ndtr.c: erf x = x T(x^2) / U(x^2) for |x| < 1, and
# erfc x = exp(-x^2) P(x) / Q(x) for 1 <= x < 8.
ERF_T = (9.60497373987051638749e0, 9.00260197203842689217e1, 2.23200534594684319226e3,
         7.00332514112805075473e3, 5.55923013010394962768e4)
ERF_U = (1.0, 3.35617141647503099647e1, 5.21357949780152679795e2, 4.59432382970980127987e3,
         2.26290000613890934246e4, 4.92673942608635921086e4)
ERFC_P = (2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687e0,
          4.86371970985681366614e1, 1.96520832956077098242e2, 5.26445194995477358631e2,
          9.34528527171957607540e2, 1.02755188689515710272e3, 5.57535335369399327526e2)
ERFC_Q = (1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2,
          9.75708501743205489753e2, 1.82390916687909736289e3, 2.24633760818710981792e3,
          1.65666309194161350182e3, 5.57535340817727675546e2)


def _erf_block(x, y, t, p):
    """y = erf(x) on a block; t and p are work space."""
    if x.dtype == np.float64:
        small = np.abs(x) < 1
        near, far = x[small], x[~small]
        z = near * near
        y[small] = near * _polynomial(ERF_T, z) / _polynomial(ERF_U, z)
        z = np.minimum(np.abs(far), 6)  # erf 6 is 1 to the last bit
        erfc = np.exp(-z * z) * _polynomial(ERFC_P, z) / _polynomial(ERFC_Q, z)
        y[~small] = np.copysign(1 - erfc, far)
    else:
        _odd_rational(x, ERF32_END, ERF32_P, ERF32_Q, y, t, p)


def _phi_block(x, y, t, p):
    """y = Phi(x) = (1 + erf(x / sqrt 2)) / 2 on a block; t and p are work space."""
    if x.dtype == np.float64:
        _erf_block(x * math.sqrt(0.5), y, t, p)
        y *= 0.5
    else:
        _odd_rational(x, PHI32_END, PHI32_P, PHI32_Q, y, t, p)
    y += 0.5


def _odd_rational(x, end, numerator, denominator, y, t, p):
    """y = z P(z^2) / Q(z^2) with z = x held within -end .. end."""
    np.clip(x, -end, end, out=y)
    np.multiply(y, y, out=t)
    y *= _polynomial(numerator, t, out=p)
    y /= _polynomial(denominator, t, out=p)


def _polynomial(coefficients, x, out=None):
    """c[0] x^n + ... + c[n] by Horner's rule."""
    out = np.multiply(x, coefficients[0], out=out)
    for c in coefficients[1:-1]:
        out += c
        out *= x
    out += coefficients[-1]
    return out


def _elementwise(body, *inputs, temps=0):
    flat = [x.reshape(-1) for x in inputs]
    y = np.empty(flat[0].shape, flat[0].dtype)
    by_blocks(body, flat, [y], temps)
    return y.reshape(inputs[0].shape)

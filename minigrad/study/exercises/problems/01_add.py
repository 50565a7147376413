"""Exercise 1: what a rule is, and the rule of y = a + b.

THE DEFINITION. Somewhere after y a program computes one number, the loss L. Call

    ct  =  dL/dy,    an array of y's shape: how much L changes per unit of each element of y

the *cotangent* of y. Write <u, v> for the sum of all products of elements, (u * v).sum(). If y changes by a small dy,
the loss changes by

    dL = <ct, dy>.                                                                                   (1)

Now let y = f(x), and let x change by dx. Then y changes by some dy, and L by <ct, dy>. The *rule* of f (its vjp) says
which array ct_x makes this <ct_x, dx>, whatever dx is: ct_x is dL/dx, the cotangent of x. There is one recipe for every
function:

    1. write dy in terms of dx;
    2. put it into (1);
    3. move everything that is not dx to the other side of the <,>. What stands beside dx there is ct_x.

AN EXAMPLE, y = tanh(x), elementwise.   1. dy = (1 - y^2) dx.   2. dL = <ct, (1 - y^2) dx>.   3. A product of elements
may be regrouped, so dL = <ct (1 - y^2), dx>, and therefore ct_x = ct (1 - y^2).

YOUR TURN, y = a + b.   1. dy = da + db.   2. dL = <ct, da + db>.   3. Split the sum in two; read off both cotangents.

    ct, a, b    float arrays of one shape, NumPy
    returns     (ct_a, ct_b), each of the shape and dtype of its argument

Never write into ct (`ct += 1`): other rules may still need it. Returning it as it is, is fine.
"""


def add(a, b):
    return a + b


def add_vjp(ct, a, b):
    """(ct_a, ct_b) for y = a + b"""
    # [yours]
    return ct, ct
    # [end]


# Hint: <ct, da + db> = <ct, da> + <ct, db>. What stands beside da? Beside db?

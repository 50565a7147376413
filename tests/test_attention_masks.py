"""document_mask and padding_mask: what they show, what attention makes of it, and what the tiled kernel leaves out."""

import numpy as np
import pytest

import minigrad as mg
import minigrad.functional as F
from minigrad.kernels.numpy import attention as kernel

WAYS = pytest.mark.parametrize("implementation", ["composed", "fused", "tiled"])
IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 3, 3, -1, -1]])


def qkv(rng, b=2, h=2, t=9, d=4):
    return [mg.tensor(rng.standard_normal((b, h, t, d)), requires_grad=True) for _ in range(3)]


def attend(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def test_document_mask_by_hand():
    seen = F.document_mask([7, 7, 0, -1])                # names of documents need no order, and rows no batch
    assert seen.dtype == bool and seen.tolist() == [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]]
    assert F.document_mask(IDS).shape == (2, 1, 9, 9)
    assert F.document_mask(mg.tensor(IDS)).tolist() == F.document_mask(IDS).tolist()
    cross = F.document_mask([[0, 1, -1]], [[1, 1, 0, -1, 0]])
    assert cross.tolist() == [[[[0, 0, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]]]
    assert F.document_mask(np.zeros((3, 0), int)).shape == (3, 1, 0, 0)


def test_padding_mask_by_hand():
    assert F.padding_mask([1, 3, 0], 3).tolist() == [[[[1, 0, 0]]], [[[1, 1, 1]]], [[[0, 0, 0]]]]
    assert F.padding_mask(mg.tensor([[2], [1]]), 4).shape == (2, 1, 1, 1, 4)
    assert F.padding_mask(2, 3).tolist() == [[[1, 1, 0]]]


@WAYS
@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_row_is_its_documents_side_by_side(rng, implementation, causal):
    """Outputs and gradients of each document are those of the document alone."""
    q, k, v = qkv(rng)
    ct = rng.standard_normal(q.shape)
    o = attend(q, k, v, F.document_mask(IDS), is_causal=causal, empty_rows="zeros", implementation=implementation)
    o.backward(ct)
    for b, i in [(0, 0), (0, 1), (0, 2), (1, 5), (1, 3)]:
        at = np.flatnonzero(IDS[b] == i)
        alone = [mg.tensor(x.numpy()[b][:, at], requires_grad=True) for x in (q, k, v)]
        o_alone = attend(*alone, is_causal=causal, implementation=implementation)
        o_alone.backward(ct[b][:, at])
        np.testing.assert_allclose(o.numpy()[b][:, at], o_alone.numpy(), rtol=1e-12, atol=1e-12)
        for x, x_alone in zip((q, k, v), alone):
            np.testing.assert_allclose(x.grad.numpy()[b][:, at], x_alone.grad.numpy(), rtol=1e-12, atol=1e-12)


@WAYS
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "window": 2}, {"softcap": 2.0}],
                         ids=str)
def test_other_documents_get_no_gradient_and_change_no_bit(rng, implementation, options):
    q, k, v = qkv(rng)
    options = {**options, "empty_rows": "zeros", "implementation": implementation}
    mine = (IDS == 1) | (IDS == 3)                       # one document of each row
    o = attend(q, k, v, F.document_mask(IDS), **options)
    (o * mine[:, None, :, None]).sum().backward()
    for x in (q, k, v):
        grad = np.moveaxis(x.grad.numpy(), 1, 2)         # (B, T, H, D)
        assert (grad[~mine] == 0).all()
        assert x is q or np.abs(grad[mine]).min() > 0 or options.get("window")
    others = [np.where(mine[:, None, :, None], x.numpy(), 1.7 * x.numpy() + 3) for x in (k, v)]
    o_others = attend(q, *map(mg.tensor, others), F.document_mask(IDS), **options)
    assert (np.moveaxis(o.numpy() == o_others.numpy(), 1, 2)[mine]).all()


@WAYS
def test_padding_rows_are_empty_rows(rng, implementation):
    q, k, v = qkv(rng)
    with pytest.raises(ValueError, match=r"sees no key .*batch 1, head 0, query 7.*empty_rows=\"zeros\""):
        attend(q, k, v, F.document_mask(IDS), is_causal=True, implementation=implementation)
    o = attend(q, k, v, F.document_mask(IDS), is_causal=True, empty_rows="zeros", implementation=implementation)
    o.sum().backward()
    for x in (o, q.grad, k.grad, v.grad):
        assert (x.numpy()[1, :, 7:] == 0).all() and np.isfinite(x.numpy()).all()


@WAYS
def test_keys_of_padding_are_as_if_they_were_not_there(rng, implementation):
    """Cross-attention over source sequences of 2 and 5 keys in one array; a mask of documents joins by &."""
    q, k, v = qkv(rng, t=5)
    o = attend(q, k, v, F.padding_mask([2, 5], 5), implementation=implementation)
    for b, n in enumerate([2, 5]):
        alone = attend(q[b], k[b, :, :n], v[b, :, :n], implementation=implementation)
        np.testing.assert_allclose(o[b].numpy(), alone.numpy(), rtol=1e-12, atol=1e-12)
    both = F.document_mask(np.array([[0, 0, 1, 1, 1]] * 2)) & F.padding_mask([4, 5], 5)
    o = attend(q, k, v, both, implementation=implementation)
    alone = attend(q[0, :, 2:], k[0, :, 2:4], v[0, :, 2:4], implementation=implementation)
    np.testing.assert_allclose(o[0, :, 2:].numpy(), alone.numpy(), rtol=1e-12, atol=1e-12)


@WAYS
def test_an_offset_per_sequence_is_a_visible_set(rng, implementation):
    """Two sequences with 1 and 4 keys in their caches each add 3: a batch with caches of unequal length."""
    k, v = (rng.standard_normal((2, 2, 7, 4)) for _ in range(2))
    q, cached = rng.standard_normal((2, 2, 3, 4)), np.array([1, 4])
    seen = F.visible_set(3, 7, F.padding_mask(cached + 3, 7), causal=True, query_offset=cached.reshape(2, 1, 1, 1))
    o = attend(*map(mg.tensor, (q, k, v)), seen, implementation=implementation).numpy()
    for b, n in enumerate(cached):
        alone = attend(*(mg.tensor(x) for x in (q[b], k[b, :, :n + 3], v[b, :, :n + 3])), is_causal=True,
                       query_offset=n, implementation=implementation).numpy()
        np.testing.assert_allclose(o[b], alone, rtol=1e-12, atol=1e-12)


def test_tiled_skips_what_packing_hides(rng):
    """Four documents of 1024 in 4096 positions, tiles of 256 queries by 512 keys (the kernel's sizes).

    All: 16 x 8. Full attention in a document: 4 blocks of queries x 2 tiles. Causal: a document's blocks of queries see
    256, 512, 768 and 1024 of its keys, and 512 keys or part of them make a tile.
    """
    t = 4096
    assert (kernel.TILE_ROWS, kernel.KEYS) == (256, 512)
    q = rng.standard_normal((1, 1, t, 2)).astype(np.float32)
    packed = F.document_mask(np.arange(t)[None] // 1024)

    def tiles(mask, causal):
        p = kernel.Problem(q, q, q, mask, None, None, scale=1.0, query_offset=0, causal=causal, window=None,
                           softcap=None, kv_head=None, dropout=None)
        return sum(len(kernel.tiles(p, block)) for block in p.blocks(kernel.TILE_ROWS))

    assert tiles(None, False) == 16 * 8
    assert tiles(packed, False) == 4 * 4 * 2
    assert tiles(None, True) == 2 * sum(range(1, 9))     # 72
    assert tiles(packed, True) == 4 * (1 + 1 + 2 + 2)


def test_errors():
    with pytest.raises(TypeError, match=r"\[document_mask\] takes integers: got float64"):
        F.document_mask([0.5, 1.0])
    with pytest.raises(ValueError, match=r"\[document_mask\] ids are \(\*L, T\) .* ids \(2, 3\), key_ids \(3, 3\)"):
        F.document_mask(np.zeros((2, 3), int), np.zeros((3, 3), int))
    with pytest.raises(ValueError, match=r"\[document_mask\]"):
        F.document_mask(3)
    with pytest.raises(ValueError, match=r"query_offset is one integer: got shape \(2,\).*F.visible_set"):
        attend(*[mg.randn(2, 1, 3, 4)] * 3, is_causal=True, query_offset=np.array([0, 1]))
    with pytest.raises(TypeError, match=r"\[padding_mask\] takes integers: got bool"):
        F.padding_mask(np.ones(3, bool), 4)
    with pytest.raises(ValueError, match=r"\[padding_mask\] a length is in 0 to 4.*\[5, -1\]"):
        F.padding_mask([5, -1], 4)

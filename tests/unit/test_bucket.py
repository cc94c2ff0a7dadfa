"""One bucket: gradients go into its memory, and memory that someone else holds is left to him."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.parallel.bucket import Bucket, dense_strides


def make(*shapes: tuple[int, ...]) -> tuple[Bucket, list[nn.Parameter]]:
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return Bucket(0, range(len(params)), params, sparse=False, last=True), params


def place_all(bucket: Bucket, grads: list[Tensor], scale: float = 1.0) -> None:
    """As backward does it: the parameter has the gradient, nobody else."""
    bucket.reset()
    for slot in range(len(grads)):
        bucket.params[slot].grad = grads[slot].clone()
        bucket.place(slot, bucket.params[slot].grad, scale)


def test_gradients_become_views_of_one_buffer() -> None:
    bucket, params = make((2, 3), (4,), ())
    grads = [torch.randn(2, 3), torch.randn(4), torch.randn(())]
    place_all(bucket, grads, 0.5)
    assert torch.equal(bucket.buffer(), torch.cat([grad.reshape(-1) for grad in grads]) * 0.5)
    bucket.buffer().fill_(7.0)
    assert all(param.grad is not None and bool((param.grad == 7).all()) for param in params)


def test_views_keep_the_strides_of_their_parameters() -> None:
    turned = nn.Parameter(torch.randn(3, 5).t())
    last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
    bucket = Bucket(0, range(3), [turned, last, gaps], sparse=False, last=False)
    assert [grad.stride() for grad in bucket.gradients()] == [turned.stride(), last.stride(), (3, 1)]
    grads = [torch.randn_like(turned), torch.randn_like(last), torch.randn(4, 3)]
    place_all(bucket, grads)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(bucket.params, grads, strict=True))


def test_no_copy_where_the_gradient_is_there_already() -> None:
    bucket, params = make((3,), (2,))
    place_all(bucket, [torch.ones(3), torch.ones(2)])
    pointers = [param.grad.data_ptr() for param in params if param.grad is not None]
    bucket.reset()
    for slot, param in enumerate(params):
        assert param.grad is not None
        bucket.place(slot, param.grad, 0.5)
    assert [param.grad.data_ptr() for param in params if param.grad is not None] == pointers
    assert torch.equal(bucket.buffer(), torch.full((5,), 0.5))


def test_a_kept_gradient_is_left_alone() -> None:
    holds = [lambda g: g, lambda g: g.detach(), lambda g: g.view(-1), lambda g: g[1:], lambda g: g.detach().numpy()]
    for hold in holds:
        bucket, params = make((3,), (2,))
        place_all(bucket, [torch.ones(3), torch.ones(2)])
        kept = hold(params[0].grad)
        for param in params:
            param.grad = None
        place_all(bucket, [torch.full((3,), 5.0), torch.full((2,), 5.0)])
        assert float(kept.sum()) == float(kept.size if not isinstance(kept, Tensor) else kept.numel())
        assert torch.equal(bucket.buffer(), torch.full((5,), 5.0))


def test_a_moved_view_is_made_again() -> None:
    """`grad.data = ...` takes our view to other memory; then the parameter lets go of it."""
    for dropped in (None, torch.ones(3)):
        bucket, params = make((3,), (2,))
        place_all(bucket, [torch.ones(3), torch.ones(2)])
        assert params[0].grad is not None
        params[0].grad.data = torch.full((3,), 9.0)
        params[0].grad = dropped
        place_all(bucket, [torch.full((3,), 5.0), torch.full((2,), 5.0)])
        assert torch.equal(bucket.buffer(), torch.full((5,), 5.0))


def test_memory_is_reused_where_nobody_holds_it() -> None:
    bucket, params = make((3,), (2,))
    place_all(bucket, [torch.ones(3), torch.ones(2)])
    before = bucket.buffer().data_ptr()
    for _ in range(3):
        for param in params:
            param.grad = None
        place_all(bucket, [torch.ones(3), torch.ones(2)])
    assert bucket.buffer().data_ptr() == before


def test_reads_as_torchs_bucket() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    bucket = Bucket(4, (2, 0), params, sparse=False, last=False)
    assert (bucket.index(), bucket.is_last(), bucket.members) == (4, False, (2, 0))
    assert bucket.parameters()[0] is params[2]
    assert [list(grad.shape) for grad in bucket.gradients()] == [[4], [2]]


def test_sparse_gradient_is_the_buffer() -> None:
    param = nn.Parameter(torch.zeros(4, 2))
    bucket = Bucket(0, (0,), [param], sparse=True, last=True)
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (4, 2), check_invariants=False)
    bucket.place(0, grad, 0.5)
    assert bucket.buffer().is_sparse
    assert torch.equal(bucket.buffer().to_dense()[1], torch.ones(2))


def test_dense_strides() -> None:
    assert dense_strides(torch.empty(4, 3).t()) == (1, 3)
    assert dense_strides(torch.empty(4, 6)[:, ::2]) == (3, 1)
    assert dense_strides(torch.empty(1, 5).expand(3, 5)) == (5, 1)
    assert dense_strides(torch.empty(())) == ()
    assert dense_strides(torch.empty(0, 3)) == torch.empty(0, 3).stride()
    assert torch.Size(dense_strides(torch.empty(2, 1, 3))) == torch.Size((3, 3, 1))

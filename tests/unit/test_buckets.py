"""Plans of buckets: every gradient once, kinds apart, caps kept, in the order of readiness."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.buckets import GradSpec, first_plan, plan_buckets

SPECS = st.lists(
    st.builds(
        GradSpec, nbytes=st.integers(0, 5000), kind=st.sampled_from([("float32",), ("float64",)]), alone=st.booleans()
    ),
    max_size=30,
)
CAPS = st.lists(st.integers(0, 6000), min_size=1, max_size=4)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[GradSpec], list[int], list[int]]:
    specs = draw(SPECS)
    return specs, draw(st.permutations(range(len(specs)))), draw(CAPS)


@given(plans())
def test_every_gradient_once_and_kinds_apart(case: tuple[list[GradSpec], list[int], list[int]]) -> None:
    specs, order, caps = case
    plan = plan_buckets(specs, order, caps)
    assert sorted(index for members in plan for index in members) == list(range(len(specs)))
    for members in plan:
        assert len({specs[index].kind for index in members}) == 1
        assert len(members) == 1 or not any(specs[index].alone for index in members)


@given(plans())
def test_members_and_buckets_stand_in_order_of_readiness(case: tuple[list[GradSpec], list[int], list[int]]) -> None:
    specs, order, caps = case
    plan = plan_buckets(specs, order, caps)
    place = {index: position for position, index in enumerate(order)}
    assert all([place[i] for i in members] == sorted(place[i] for i in members) for members in plan)
    ready = [place[members[-1]] for members in plan]
    assert ready == sorted(ready)


@given(plans())
def test_caps_are_exceeded_by_the_last_member_only(case: tuple[list[GradSpec], list[int], list[int]]) -> None:
    specs, order, caps = case
    plan = [members for members in plan_buckets(specs, order, caps) if not specs[members[0]].alone]
    for kind in (("float32",), ("float64",)):
        of_kind = [members for members in plan if specs[members[0]].kind == kind]
        full = []
        for position, members in enumerate(sorted(of_kind, key=lambda m: order.index(m[0]))):
            cap = caps[min(position, len(caps) - 1)]
            nbytes = [specs[index].nbytes for index in members]
            assert sum(nbytes[:-1]) < max(cap, 1) or sum(nbytes[:-1]) == 0 < cap
            full.append(sum(nbytes) >= cap)
        assert all(full[:-1])


@given(plans())
def test_same_buckets_as_torch(case: tuple[list[GradSpec], list[int], list[int]]) -> None:
    specs, order, caps = case
    dtypes = {("float32",): torch.float32, ("float64",): torch.float64}
    tensors = [
        torch.empty(spec.nbytes // 8 * 8 // dtypes[spec.kind].itemsize, dtype=dtypes[spec.kind]) for spec in specs
    ]
    specs = [spec._replace(nbytes=tensor.nbytes) for spec, tensor in zip(specs, tensors, strict=True)]
    if not specs:
        return
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [tensors[i] for i in order], [max(cap, 1) for cap in caps], [spec.alone for spec in specs], list(order)
    )
    mine = plan_buckets(specs, order, [max(cap, 1) for cap in caps])
    assert sorted(map(tuple, theirs)) == sorted(mine)


def test_first_plan_is_backwards_and_sorted_inside() -> None:
    specs = [GradSpec(nbytes=4, kind=("float32",)) for _ in range(6)]
    assert first_plan(specs, [8, 12]) == [(4, 5), (1, 2, 3), (0,)]


def test_small_first_bucket() -> None:
    specs = [GradSpec(nbytes=10, kind=("float32",)) for _ in range(5)]
    assert plan_buckets(specs, [4, 3, 2, 1, 0], [10, 30]) == [(4,), (3, 2, 1), (0,)]


def test_nothing_to_plan() -> None:
    assert plan_buckets([], [], [1]) == []


def test_order_must_be_a_permutation() -> None:
    with pytest.raises(AssertionError, match="permutation"):
        plan_buckets([GradSpec(1, ("float32",))], [0, 0], [1])

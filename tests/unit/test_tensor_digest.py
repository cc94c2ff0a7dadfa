"""A digest of a tensor's bytes: equal for equal elements, other for any flipped bit and any two that change places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.observe.tensor_digest import digests

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
ROW, PIECE = 4096, 1 << 21  # bytes
SIZES = [0, 1, 7, 8, 9, 511, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, PIECE - 3, PIECE, PIECE + ROW + 9]


def octets(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(tensor: Tensor) -> int:
    return digests([tensor])[0]


@pytest.mark.parametrize("size", SIZES)
def test_any_flipped_bit_shows(size: int) -> None:
    tensor = octets(size)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    for place in {0, 1, size // 3, size // 2, size - 2, size - 1} & set(range(size)):
        for bit in (0, 3, 7):
            tensor[place] ^= 1 << bit
            assert digest(tensor) != before, (place, bit)
            tensor[place] ^= 1 << bit


@pytest.mark.parametrize("size", [n for n in SIZES if n >= 16])
def test_elements_that_change_places_show(size: int) -> None:
    words = torch.randn(size // 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, last = digest(words), len(words) - 1
    for a, b in {(0, 1), (0, last), (0, min(512, last)), (last - 1, last), (last // 2, last)}:
        if a == b:
            continue
        words[[a, b]] = words[[b, a]]
        assert digest(words) != before, (a, b)
        words[[a, b]] = words[[b, a]]
    assert digest(words) == before


@pytest.mark.parametrize("places", [(0, 1), (0, 512), (3, 515), (5, 1023), (0, 600_000)])
def test_two_signs_that_change_places_show(places: tuple[int, int]) -> None:
    """Only the highest bit of two words: what a weighted sum with even weights does not see."""
    words = torch.zeros(600_001, dtype=torch.float64)
    words[places[0]], words[places[1]] = 1.0, -1.0
    swapped = -words
    assert digest(words) != digest(swapped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    raw = octets(dtype.itemsize * 1003) % 2 if dtype is torch.bool else octets(dtype.itemsize * 1003)
    tensor = raw.view(dtype).view(17, 59)
    other = tensor.clone()
    assert digest(other) == digest(tensor) == digest(other.clone())
    other.view(torch.uint8)[16, -dtype.itemsize] ^= 1
    assert digest(other) != digest(tensor)


@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_strides_do_not_matter(shape: list[int], dtype: torch.dtype, offset: int, random: object) -> None:
    numel = int(torch.tensor(shape).prod()) if shape else 1
    plain = octets((numel + offset) * dtype.itemsize).view(torch.uint8)
    plain = (plain % 2).view(dtype) if dtype is torch.bool else plain.view(dtype)
    shifted = plain[offset:].view(shape)  # begins anywhere in memory
    assert digest(shifted) == digest(shifted.clone())
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = shifted.permute(order)
    assert digest(moved) == digest(moved.contiguous())


def test_large_strided_and_conjugate_tensors() -> None:
    image = torch.randn(3, 70, 50, 61).to(memory_format=torch.channels_last)
    assert digest(image) == digest(image.contiguous())
    wide = torch.randn(2, 400_000).t()
    assert digest(wide) == digest(wide.contiguous())
    conjugate = torch.randn(40, dtype=torch.complex64).conj()
    assert digest(conjugate) == digest(conjugate.resolve_conj())
    expanded = torch.randn(1, 5).expand(1000, 5)
    assert digest(expanded) == digest(expanded.contiguous())


def test_sparse_meta_and_none() -> None:
    sparse = torch.eye(6).to_sparse()
    other = sparse.clone()
    assert digest(sparse) == digest(other)
    other._values()[2] = 5
    assert digest(sparse) != digest(other)
    assert digests([]) == []
    assert digest(torch.empty(4, device="meta")) == digest(torch.empty(0))


def test_tensors_do_not_disturb_each_other() -> None:
    tensors = [octets(size, seed=size) for size in SIZES]
    assert digests(tensors) == [digest(tensor) for tensor in tensors]
    assert len(set(digests(tensors))) == len(SIZES)

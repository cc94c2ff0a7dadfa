"""A checkpoint that is read without trust: everything is checked before a tensor is handed out.

Only files of its own folder are opened (`open_files.py`), and the one that is read is the one that was checked. Whole
pieces are compared with their crc32 once more as they are read.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import BYTES_MAX, NAME, Manifest, digest_of, from_text
from lockstep.checkpoint.open_files import OpenFiles, crc32_of, faults, fill, read_at, sha256_of
from lockstep.checkpoint.shares import is_tiled
from lockstep.checkpoint.tensor_file import DTYPES, Stored, read_header
from lockstep.comm.tensor_parts import Part
from lockstep.errors import CheckpointDamaged

_BLOCK_BYTES = 16 << 20
_NAMED_MAX = 10  # things, in a message


class _Held(NamedTuple):
    """A piece and where it is."""

    file: str
    offset: int
    part: Part
    crc32: int


@contextlib.contextmanager
def open_checkpoint(folder: Path, *, allowed: Collection[str] = ()) -> Iterator[CheckpointReader]:
    """The checkpoint in `folder`, of which the manifest is read. `allowed`: names of other files that may be there.

    Memory: the manifest's, at most about 20 times its 64 MiB.
    Raises: CheckpointMissing where there is no folder; CheckpointDamaged for a manifest that is not the one written,
    files too many or too few, links; CheckpointError for what cannot be read for another reason.
    """
    with contextlib.closing(OpenFiles(folder)) as files:
        yield CheckpointReader(folder, files, allowed)


@final
class CheckpointReader:
    """An open checkpoint; see `open_checkpoint`."""

    def __init__(self, folder: Path, files: OpenFiles, allowed: Collection[str]) -> None:
        self.folder = folder
        self._files = files
        text = files.text(NAME, "is missing: the checkpoint was never finished", BYTES_MAX)
        self.manifest: Manifest = from_text(text, folder / NAME)
        self.manifest_digest = digest_of(text)
        self._index: dict[str, list[_Held]] | None = None
        self._check_folder(allowed)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare the files `names`, or all, with their digests, and what all files are said to hold with the manifest.

        So ranks that each verify a share of the files have, together, verified the checkpoint.
        Memory: 4 MiB, and what `read_header` and the index of all pieces take, about 500 bytes per piece.
        Raises: CheckpointDamaged, naming the files and the tensors whose bytes are not those that were written.
        """
        faults = []
        for name in self.manifest.files if names is None else names:
            try:
                self._verify_file(name)
            except CheckpointDamaged as fault:
                faults.append(str(fault))
        if faults:
            raise CheckpointDamaged(some(faults))
        self._pieces()

    def read(self, path: str) -> Tensor:
        """All of tensor `path`, on the CPU. Raises: as `read_into`."""
        dtype, shape = self.manifest.tensors[self.manifest.target(path)]
        out = torch.empty(shape, dtype=DTYPES[dtype])
        self.read_into(out, path, Part((0,) * len(shape), shape))
        return out

    def read_into(self, out: Tensor, path: str, part: Part) -> None:
        """`out` becomes `part` of tensor `path`, in its own dtype. Reads the rows of pieces that are asked for.

        Memory: none where rows of `out` lie in it as in the file, on the CPU and with the same dtype; else 16 MiB.
        Raises: CheckpointDamaged where a file ends too early, has changed, or a whole piece is not the one written.
        """
        path = self.manifest.target(path)
        dtype, shape = self.manifest.tensors[path]
        assert tuple(out.shape) == part.shape, f"{path}: {part} does not go into {tuple(out.shape)}"
        assert all(a >= 0 and a + n <= m for a, n, m in zip(*part, shape, strict=True)), f"{path}: {part} of {shape}"
        for held in self._pieces().get(path, ()):
            common = held.part.overlap(part)
            if common is None:
                continue
            with faults(self.folder / held.file, "is missing"):
                fd = self._files.descriptor(held.file)
                copy = _Copy(fd, DTYPES[dtype])
                copy.run(out.detach()[common.within(part).slices], held.offset, held.part, common)
            if common == held.part and copy.crc32 != held.crc32:
                raise CheckpointDamaged(f"{self.folder / held.file}: tensor {path} is damaged")

    def files_of_tensors(self) -> dict[str, list[str]]:
        """Which files have elements of a tensor, by its path. Raises: CheckpointDamaged, as their headers are read."""
        return {path: list(dict.fromkeys(held.file for held in pieces)) for path, pieces in self._pieces().items()}

    # -------------------------------------------------------------- checking

    def _check_folder(self, allowed: Collection[str]) -> None:
        step = f"step-{self.manifest.step:08}"
        names = (step, f"{step}-g{self.manifest.generation}")
        if self.folder.name not in names:
            raise CheckpointDamaged(f"{self.folder / NAME} is that of a checkpoint {names[1]}, not of this folder")
        expected = {NAME, *self.manifest.files}
        found: set[str] = set()
        with faults(self.folder, "is not there"), os.scandir(self._files.folder_fd) as entries:
            for entry in entries:
                if entry.name not in expected and entry.name not in allowed:
                    raise CheckpointDamaged(f"{self.folder} has an unexpected file, {entry.name!r}: move it away")
                found.add(entry.name)
        missing = sorted(expected - found)
        if missing:
            raise CheckpointDamaged(f"{self.folder} lacks {some(missing)}")

    def _verify_file(self, name: str) -> None:
        record = self.manifest.files[name]
        source = self.folder / name
        with faults(source, "is missing"):
            fd = self._files.descriptor(name)
            size = os.fstat(fd).st_size
            if size == record.bytes and sha256_of(fd, size) == record.sha256:
                return
            what = f"{size} bytes, {record.bytes} were written" if size != record.bytes else "its digest does not fit"
            raise CheckpointDamaged(f"{source} is damaged: {what}: {self._where(fd, name, size)}")

    def _where(self, fd: int, name: str, size: int) -> str:
        """What in a damaged file is damaged."""
        crc32 = self.manifest.files[name].crc32
        try:
            stored = self._header(fd, name)
        except (CheckpointDamaged, EOFError):
            return "its header"
        wrong = [
            place.piece.path
            for place, crc in zip(stored, crc32, strict=False)
            if place.offset + place.piece.nbytes > size or crc32_of(fd, place.offset, place.piece.nbytes) != crc
        ]
        if len(stored) != len(crc32) or not wrong:
            return "its header" if size == self.manifest.files[name].bytes else "what follows the tensors"
        return f"tensors {some(wrong)}"

    def _header(self, fd: int, name: str) -> list[Stored]:
        return read_header(partial(read_at, fd), self.manifest.files[name].bytes, str(self.folder / name))

    def _pieces(self) -> dict[str, list[_Held]]:
        """Where the elements of every tensor are; by path.

        Raises: CheckpointDamaged where the files do not hold every element of every tensor once.
        """
        if self._index is None:
            index: dict[str, list[_Held]] = {}
            for name in self.manifest.files:
                self._add_file(index, name)
            wrong = [
                path
                for path, (_, shape) in self.manifest.tensors.items()
                if not is_tiled(shape, [held.part for held in index.get(path, ())])
            ]
            if wrong:
                raise CheckpointDamaged(f"{self.folder}: the files do not hold every element once of {some(wrong)}")
            self._index = index
        return self._index

    def _add_file(self, index: dict[str, list[_Held]], name: str) -> None:
        source = self.folder / name
        with faults(source, "is missing"):
            stored = self._header(self._files.descriptor(name), name)
        crc32 = self.manifest.files[name].crc32
        if len(stored) != len(crc32):
            raise CheckpointDamaged(f"{source} has {len(stored)} pieces, the manifest says {len(crc32)}")
        for (piece, offset), crc in zip(stored, crc32, strict=True):
            dtype, shape = self.manifest.tensors.get(piece.path, ("", ()))
            if piece.dtype != dtype or len(piece.part.shape) != len(shape):
                raise CheckpointDamaged(
                    f"{source} holds {piece.dtype} {list(piece.part.shape)} of {piece.path[:200]!r}, which is, "
                    f"by the manifest, {f'{dtype} {list(shape)}' if dtype else 'no tensor'}"
                )
            index.setdefault(piece.path, []).append(_Held(name, offset, piece.part, crc))


@final
class _Copy:
    """A box of a piece into a tensor, block by block, with the crc32 of what was read."""

    def __init__(self, fd: int, dtype: torch.dtype) -> None:
        self.crc32 = 0
        self._fd = fd
        self._dtype = dtype

    def run(self, out: Tensor, offset: int, held: Part, common: Part) -> None:
        """`out` becomes the elements `common` of `held`, which begins at byte `offset`; both are parts of the same."""
        row_bytes = self._dtype.itemsize * math.prod(held.shape[1:])
        if not held.shape:
            self._block(out.view(1), offset, (1,), ())
            return
        first = common.start[0] - held.start[0]
        rows = common.shape[0]
        inner_held, inner = (Part(part.start[1:], part.shape[1:]) for part in (held, common))
        if row_bytes > _BLOCK_BYTES and len(held.shape) > 1:
            for row in range(rows):
                self.run(out[row], offset + (first + row) * row_bytes, inner_held, inner)
            return
        count = max(1, _BLOCK_BYTES // row_bytes)
        for row in range(0, rows, count):
            block = out[row : row + count]
            shape = (len(block), *held.shape[1:])
            self._block(block, offset + (first + row) * row_bytes, shape, inner.within(inner_held).slices)

    def _block(self, out: Tensor, offset: int, shape: tuple[int, ...], inner: tuple[slice, ...]) -> None:
        """`out` becomes [:, *inner] of the `shape` elements at byte `offset`."""
        plain = out.is_contiguous() and not out.is_conj() and not out.is_neg() and out.device.type == "cpu"
        direct = plain and out.dtype == self._dtype and out.shape == shape
        block = out if direct else torch.empty(shape, dtype=self._dtype)
        data = block.view(-1).view(torch.uint8).numpy().data
        fill(self._fd, data, offset)
        self.crc32 = zlib.crc32(data, self.crc32)
        if not direct:
            out.copy_(block[(slice(None), *inner)])


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one do: nothing can be read into it.

    Memory: none for views that slicing, transposing and expanding make; for others 24 bytes per element.
    """
    if tensor.is_contiguous():
        return False
    dims = sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0  # from the first to the last element of the dims so far
    for stride, n in dims:
        if stride <= reach:
            break
        reach += stride * (n - 1)
    else:
        return False
    if dims[0][0] == 0:
        return True
    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, n in dims:
        offsets = (offsets[:, None] + stride * torch.arange(n)).view(-1)
    return len(offsets.unique()) < len(offsets)


def some(names: Sequence[str], between: str = ", ") -> str:
    """The first of many, for a message."""
    more = len(names) - _NAMED_MAX
    return between.join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")

"""A checkpoint that is read without trust: everything is checked before a tensor is handed out.

The folder is opened once, and files are opened in it, by their plain names: no link is followed, nothing outside is
touched, whatever the files say. A file that is read is the one that was checked: the same open file, or, in a
checkpoint of more files than are kept open, one of the same inode, size and time of change. Whole pieces are compared
with their crc32 once more as they are read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import stat
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import BYTES_MAX, NAME, Manifest, digest_of, from_text
from lockstep.checkpoint.shares import is_tiled
from lockstep.checkpoint.tensor_file import DTYPES, Stored, read_header
from lockstep.comm.tensor_parts import Part
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

_BLOCK_BYTES = 16 << 20
_HASH_BYTES = 4 << 20
_OPEN_MAX = 64
_NAMED_MAX = 10  # of damaged things, in a message
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a pipe would wait


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
    with _faults(folder, "is not there", CheckpointMissing):
        folder_fd = os.open(folder, _FLAGS | os.O_DIRECTORY)
    files = _OpenFiles(folder, folder_fd)
    try:
        yield CheckpointReader(folder, files, allowed)
    finally:
        files.close()
        _close(folder_fd)


@final
class CheckpointReader:
    """An open checkpoint; see `open_checkpoint`."""

    def __init__(self, folder: Path, files: _OpenFiles, allowed: Collection[str]) -> None:
        self.folder = folder
        self._files = files
        text = files.text(NAME)
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
            raise CheckpointDamaged(_some(faults))
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
            with _faults(self.folder / held.file, "is missing"):
                fd = self._files.descriptor(held.file)
                copy = _Copy(fd, DTYPES[dtype])
                copy.run(out.detach()[common.within(part).slices], held.offset, held.part, common)
            if common == held.part and copy.crc32 != held.crc32:
                raise CheckpointDamaged(f"{self.folder / held.file}: tensor {path} is damaged")

    # -------------------------------------------------------------- checking

    def _check_folder(self, allowed: Collection[str]) -> None:
        step = f"step-{self.manifest.step:08}"
        names = (step, f"{step}-g{self.manifest.generation}")
        if self.folder.name not in names:
            raise CheckpointDamaged(f"{self.folder / NAME} is that of a checkpoint {names[1]}, not of this folder")
        expected = {NAME, *self.manifest.files}
        found: set[str] = set()
        with _faults(self.folder, "is not there"), os.scandir(self._files.folder_fd) as entries:
            for entry in entries:
                if entry.name not in expected and entry.name not in allowed:
                    raise CheckpointDamaged(f"{self.folder} has an unexpected file, {entry.name!r}: move it away")
                found.add(entry.name)
        missing = sorted(expected - found)
        if missing:
            raise CheckpointDamaged(f"{self.folder} lacks {_some(missing)}")

    def _verify_file(self, name: str) -> None:
        record = self.manifest.files[name]
        source = self.folder / name
        with _faults(source, "is missing"):
            fd = self._files.descriptor(name)
            size = os.fstat(fd).st_size
            if size == record.bytes and _sha256(fd, size) == record.sha256:
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
            if place.offset + place.piece.nbytes > size or _crc32(fd, place) != crc
        ]
        if len(stored) != len(crc32) or not wrong:
            return "its header" if size == self.manifest.files[name].bytes else "what follows the tensors"
        return f"tensors {_some(wrong)}"

    def _header(self, fd: int, name: str) -> list[Stored]:
        def read_at(offset: int, count: int) -> bytes:
            data = bytearray(count)
            _read(fd, memoryview(data), offset)
            return bytes(data)

        return read_header(read_at, self.manifest.files[name].bytes, str(self.folder / name))

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
                raise CheckpointDamaged(f"{self.folder}: the files do not hold every element once of {_some(wrong)}")
            self._index = index
        return self._index

    def _add_file(self, index: dict[str, list[_Held]], name: str) -> None:
        source = self.folder / name
        with _faults(source, "is missing"):
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
class _OpenFiles:
    """Files of one folder, opened when they are needed; so many stay open."""

    def __init__(self, folder: Path, folder_fd: int) -> None:
        self.folder_fd = folder_fd
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._seen: dict[str, tuple[int, ...]] = {}

    def descriptor(self, name: str) -> int:
        """File `name`, open. Valid until the next call. Raises: OSError; CheckpointDamaged where it is no file."""
        fd = self._open.get(name)
        if fd is None:
            while len(self._open) >= _OPEN_MAX:
                _close(self._open.popitem(last=False)[1])
            fd = self._open[name] = os.open(name, _FLAGS, dir_fd=self.folder_fd)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointDamaged(f"{self._folder / name} is no regular file")
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._seen.setdefault(name, identity) != identity:
                raise CheckpointDamaged(f"{self._folder / name} was changed while it was read")
        self._open.move_to_end(name)
        return fd

    def text(self, name: str) -> str:
        """All of a small file of ASCII. Raises: CheckpointDamaged for one that is large or something else."""
        source = self._folder / name
        with _faults(source, "is missing: the checkpoint was never finished"):
            fd = self.descriptor(name)
            size = os.fstat(fd).st_size
            if size > BYTES_MAX:
                raise CheckpointDamaged(f"{source} is damaged: {size} bytes, a manifest has at most {BYTES_MAX}")
            data = bytearray(size)
            _read(fd, memoryview(data), 0)
        try:
            return data.decode("ascii")
        except UnicodeDecodeError as error:
            raise CheckpointDamaged(f"{source} is damaged: {error}") from error

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            _close(self._open.popitem()[1])


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the kernel has closed it; of what was only read nothing can be lost
        os.close(fd)


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
        _read(self._fd, data, offset)
        self.crc32 = zlib.crc32(data, self.crc32)
        if not direct:
            out.copy_(block[(slice(None), *inner)])


# ------------------------------------------------------------------ bytes of files


def _read(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from byte `offset`. Raises: EOFError where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise EOFError(f"it ends at byte {offset + done}")
        done += count


def _sha256(fd: int, size: int) -> str:
    digest = hashlib.sha256()
    for block in _blocks(fd, 0, size):
        digest.update(block)
    return digest.hexdigest()


def _crc32(fd: int, stored: Stored) -> int:
    crc = 0
    for block in _blocks(fd, stored.offset, stored.piece.nbytes):
        crc = zlib.crc32(block, crc)
    return crc


def _blocks(fd: int, offset: int, size: int) -> Iterator[memoryview]:
    """The bytes, in a buffer that is used again."""
    buffer = memoryview(bytearray(min(size, _HASH_BYTES)))
    for start in range(0, size, _HASH_BYTES):
        block = buffer[: min(_HASH_BYTES, size - start)]
        _read(fd, block, offset + start)
        yield block


@contextlib.contextmanager
def _faults(source: Path, absent: str, missing: type[CheckpointError] = CheckpointDamaged) -> Iterator[None]:
    """What the system says of file or folder `source`, as our errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing(f"{source} {absent}") from error
    except EOFError as error:
        raise CheckpointDamaged(f"{source} is damaged: {error}") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckpointDamaged(f"{source} is a link, or not of the kind that it should be: {error}") from error
        if error.errno in (errno.EIO, errno.ENXIO, errno.EISDIR):
            raise CheckpointDamaged(f"{source} cannot be read: {error}") from error
        raise CheckpointError(f"cannot read {source}: {error}") from error


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")

"""The zip archives that torch writes, read strictly: stored records only, each checked by its CRC.

Python's `zipfile` unpacks what it finds, takes sizes as they are told and raises six kinds of errors for damage; an
archive of a checkpoint needs a tenth of what it can do. A record here is a range of the file that no other one shares.

Source: PKWARE's APPNOTE.TXT 6.3, sections 4.3.7, 4.3.12 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from lockstep.checkpoint.foreign.window import Window
from lockstep.errors import CheckpointError

MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_LISTED = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_DIRECTORY_BYTES_MAX = 128 << 20
_KNOWN_FLAGS = 0x0808  # sizes follow the data, names are UTF-8


class _Record(NamedTuple):
    header: int  # where its local header begins
    bytes: int
    crc32: int
    method: int  # of compression; 0: none
    end: int  # where the next one begins


@final
class ZipRecords:
    """The records of one archive by name.

    Raises: CheckpointDamaged for what is no whole archive, CheckpointError for what torch does not write.
    """

    def __init__(self, file: Window) -> None:
        self.file = file
        self._records = self._listed(*self._directory())

    @property
    def names(self) -> list[str]:
        """Names of all records."""
        return list(self._records)

    def size(self, name: str) -> int:
        """Bytes of record `name`."""
        return self._record(name).bytes

    def read(self, name: str, most: int) -> bytes:
        """Record `name`, of `most` bytes or less. Raises: CheckpointDamaged where its CRC does not fit."""
        size = self.size(name)
        if size > most:
            raise CheckpointError(f"{self.file.name}: {name} has {size} bytes, more than the {most} that are read")
        out = bytearray(size)
        self.read_into(memoryview(out), name)
        return bytes(out)

    def read_into(self, out: memoryview, name: str) -> None:
        """Fill `out`, which has the record's size. Raises: CheckpointDamaged where its CRC does not fit."""
        record = self._record(name)
        assert len(out) == record.bytes, f"{name} has {record.bytes} bytes, not {len(out)}"
        crc = 0
        for block in self.file.read_blocks(out, self._data_start(name, record)):
            crc = zlib.crc32(block, crc)
        if crc != record.crc32:
            self.file.fail(f"{name} is not what was written: its CRC does not fit")

    def _record(self, name: str) -> _Record:
        if name not in self._records:
            self.file.fail(f"there is no record {name}")
        return self._records[name]

    def _data_start(self, name: str, record: _Record) -> int:
        if record.method:
            raise CheckpointError(
                f"{self.file.name}: {name} is compressed, but torch.save stores records as they are: "
                "unpack the archive and save it again with torch"
            )
        fixed = self.file.read(record.header, _LOCAL.size)
        magic, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(fixed)
        encoded = self.file.read(record.header + _LOCAL.size, min(name_bytes, len(name.encode())))
        if magic != MAGIC or encoded != name.encode() or name_bytes != len(encoded) or method or flags & ~_KNOWN_FLAGS:
            self.file.fail(f"{name} does not begin as the archive's directory says")
        told_later = flags & 0x0008
        if not told_later and (crc != record.crc32 or {packed, size} - {record.bytes, _FULL_32}):
            self.file.fail(f"the archive's directory and {name} differ in its size or CRC")
        start = record.header + _LOCAL.size + name_bytes + extra_bytes
        if start + record.bytes > record.end:
            self.file.fail(f"{name} overlaps what follows it")
        return start

    # -------------------------------------------------------------- directory

    def _directory(self) -> tuple[int, int, int]:
        """Where the directory begins and ends, and how many records it lists."""
        file = self.file
        end_at = file.bytes - _END.size
        if end_at < 0 or file.read(0, 4) != MAGIC:
            self.file.fail("this is no zip archive, or its beginning is lost")
        magic, disk, first_disk, here, count, size, start, comment = _END.unpack(file.read(end_at, _END.size))
        if magic != b"PK\x05\x06" or disk or first_disk or here != count or comment:
            self.file.fail("the archive has no end: it was cut off, or something follows it")
        limit = end_at
        if count == _FULL_16 or _FULL_32 in (size, start):
            limit, count, size, start = self._directory_64(end_at)
        if start + size > limit or size > _DIRECTORY_BYTES_MAX or count * _LISTED.size > size:
            self.file.fail(f"a directory of {size} bytes for {count} records is not where the archive's end says")
        return start, start + size, count

    def _directory_64(self, end_at: int) -> tuple[int, int, int, int]:
        """The same from the 64-bit form of the end: its place, records, size, start."""
        file, at = self.file, end_at - _LOCATOR_64.size
        magic, disk, end_64_at, disks = _LOCATOR_64.unpack(file.read(at, _LOCATOR_64.size))
        if magic != b"PK\x06\x07" or disk or disks > 1 or end_64_at + _END_64.size > at:
            self.file.fail("the archive's 64-bit end is lost")
        found = _END_64.unpack(file.read(end_64_at, _END_64.size))
        magic, _, _, _, disk, first_disk, here, count, size, start = found
        if magic != b"PK\x06\x06" or disk or first_disk or here != count:
            self.file.fail("the archive's 64-bit end is damaged")
        return end_64_at, count, size, start

    def _listed(self, start: int, end: int, count: int) -> dict[str, _Record]:
        data, at = self.file.read(start, end - start), 0
        found: list[tuple[_Record, str]] = []
        for _ in range(count):
            if at + _LISTED.size > len(data):
                self.file.fail("the archive's directory is cut off")
            fields = _LISTED.unpack_from(data, at)
            name_end = at + _LISTED.size + fields[10]
            extra_end = name_end + fields[11]
            name = self._name(data[at + _LISTED.size : name_end])
            found.append((self._place(fields, data[name_end:extra_end], name), name))
            at = extra_end + fields[12]
        if at != len(data):
            self.file.fail("the archive's directory is longer than what it lists")
        return self._separate(found, start)

    def _place(self, fields: tuple[Any, ...], extra: bytes, name: str) -> _Record:
        """One listed record, whose end is not known yet."""
        magic, _, _, flags, method, _, _, crc, packed, size, _, _, _, disk, _, _, header = fields
        if magic != b"PK\x01\x02" or disk or flags & ~_KNOWN_FLAGS:
            self.file.fail(f"the archive's directory is damaged at {name}")
        large = self._large_fields(extra)
        size, packed, header = (next(large, -1) if n == _FULL_32 else n for n in (size, packed, header))
        if min(size, packed, header) < 0 or (size != packed and not method):
            self.file.fail(f"the archive's directory has no right size or place for {name}")
        return _Record(header, packed, crc, method, 0)

    def _large_fields(self, extra: bytes) -> Iterator[int]:
        """Sizes and places that need 64 bits, in the order of the short ones."""
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            if kind == 1 and at + 4 + size <= len(extra):
                return iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            at += 4 + size
        return iter(())

    def _separate(self, found: list[tuple[_Record, str]], end: int) -> dict[str, _Record]:
        records: dict[str, _Record] = {}
        for record, name in sorted(found, reverse=True):
            if record.header + _LOCAL.size + len(name.encode()) + record.bytes > end:
                self.file.fail(f"{name} overlaps another record or the archive's directory")
            if name in records:
                self.file.fail(f"there are two records {name}")
            records[name] = record._replace(end=end)
            end = record.header
        return records

    def _name(self, encoded: bytes) -> str:
        try:
            name = encoded.decode("utf-8")
        except UnicodeDecodeError:
            self.file.fail("the archive's directory is damaged: a name is no text")
        if name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise CheckpointError(f"{self.file.name} has a record {name!r}, which no checkpoint has")
        return name

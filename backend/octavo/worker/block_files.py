"""Prefix blocks as files in a local directory that may be shared by several processes.

    DIRECTORY/FINGERPRINT/DIGEST.kv      one block: a header of 56 bytes, then its K and V

Nothing in there is needed: whoever finds a file missing, damaged or not its own computes the block instead.
A file is written under a name of its own and renamed when it is whole, so that readers, other processes among
them, see all of it or nothing; its checksum tells what a crash of the machine or a bad disk left of it. It
guards against accidents: who can write there can make a model say anything, so only the owner may. A file's
time of modification is when it was used last, and over all fingerprints the oldest are deleted first.

Used by `disk_tier` alone. `read`, `has` and `touch` are for any thread, the others for one.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

Payload = npt.NDArray[np.uint8]  # what one block holds, in all layers

SHARES = 32  # of the size limit. One is written before the directory is looked at again
_KEPT_SHARES = 28  # when files are deleted; the others are room for four instances to write one each

_MAGIC = b"octavkv\x01"  # and the version of the format
_HEADER = struct.Struct("<8sQ16s16sI4x")  # magic, bytes of payload, fingerprint, digest, CRC-32
_STALE_S = 60.0  # what is half written for so long is nobody's any more

_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[0-9a-f]{32}\.(kv|[0-9a-f]{16}\.tmp)")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe of that name is not waited for
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DamagedFile(Exception):
    """Its size, header or checksum is wrong."""


class BlockFiles:
    """The files of one model, as its `fingerprint` (16 bytes) tells: all blocks have `block_bytes`.

    `most_bytes`, at least `least_bytes(block_bytes)`, are for the whole directory. All may raise `OSError`.
    """

    def __init__(self, directory: Path, most_bytes: int, fingerprint: bytes, block_bytes: int) -> None:
        assert len(fingerprint) == 16
        assert most_bytes >= least_bytes(block_bytes)
        self.directory = directory
        self.block_bytes = block_bytes
        self._folder = directory / fingerprint.hex()
        self._fingerprint = fingerprint
        self._file_bytes = _HEADER.size + block_bytes
        self._share_bytes = most_bytes // SHARES
        self._room_bytes = 0  # to write before the directory is looked at again
        self._token = secrets.token_hex(8)  # in the names of files that this object is writing

    def path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.kv"

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for it, sound or not."""
        return os.path.lexists(self.path(digest))

    @property
    def is_due(self) -> bool:
        """Whether to `tidy` before the next `write`."""
        return self._room_bytes < self._file_bytes

    def make_folder(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{self._folder} is a symbolic link")

    def is_private(self) -> bool:
        return not stat.S_IMODE(self.directory.stat().st_mode) & 0o077

    def read(self, digest: bytes) -> Payload | None:
        """None where there is no file. Raises `DamagedFile` before more memory is taken than a block has."""
        try:
            descriptor = os.open(self.path(digest), _READ)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, f"{self.path(digest)} is not a file")
            if status.st_size != self._file_bytes:
                raise DamagedFile
            header, payload = bytearray(_HEADER.size), np.empty(self.block_bytes, np.uint8)
            if os.readv(descriptor, [header, payload.data]) != self._file_bytes:
                raise DamagedFile
        finally:
            os.close(descriptor)
        if header != self._header(digest, payload):
            raise DamagedFile
        return payload

    def write(self, digest: bytes, payload: Payload, used_ns: int) -> bool:
        """False where there is a file already, which is touched."""
        if self.touch(digest, used_ns):
            return False
        temporary = self._folder / f"{digest.hex()}.{self._token}.tmp"
        try:
            descriptor = os.open(temporary, _CREATE, 0o600)
        except FileNotFoundError:  # somebody has deleted the folder
            self.make_folder()
            descriptor = os.open(temporary, _CREATE, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._header(digest, payload))
                file.write(payload.data)
                file.flush()
                os.utime(descriptor, ns=(used_ns, used_ns))
            temporary.rename(self.path(digest))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._room_bytes -= self._file_bytes
        return True

    def touch(self, digest: bytes, used_ns: int) -> bool:
        """Notes when a file was used. False when there is none, or where that cannot be written."""
        try:
            os.utime(self.path(digest), ns=(used_ns, used_ns), follow_symlinks=False)
        except OSError:
            return False
        return True

    def delete(self, digest: bytes) -> None:
        self.path(digest).unlink(missing_ok=True)

    def tidy(self) -> int:
        """Deletes what was used least recently, as far as the limit asks for it, and what was left half
        written. Another process may do the same meanwhile. Returns how many entries of the directory have
        names that are not ours: they are left alone, and not counted."""
        files: list[tuple[int, int, Path]] = []  # when they were used, bytes
        num_foreign = 0
        for folder in list(os.scandir(self.directory)):
            if not (_FOLDER_NAME.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                num_foreign += 1
                continue
            found, others = _files(folder.path)
            files += found
            num_foreign += others
            if not found and not others and folder.name != self._folder.name:
                with contextlib.suppress(OSError):  # somebody has just put something there
                    Path(folder.path).rmdir()
        too_many = sum(num_bytes for _, num_bytes, _ in files) - _KEPT_SHARES * self._share_bytes
        for _, num_bytes, path in sorted(files):
            if too_many <= 0:
                break
            path.unlink(missing_ok=True)
            too_many -= num_bytes
        self._room_bytes = self._share_bytes
        return num_foreign

    def _header(self, digest: bytes, payload: Payload) -> bytes:
        start = _HEADER.pack(_MAGIC, self.block_bytes, self._fingerprint, digest, 0)
        return _HEADER.pack(
            _MAGIC, self.block_bytes, self._fingerprint, digest, zlib.crc32(payload.data, zlib.crc32(start))
        )


def least_bytes(block_bytes: int) -> int:
    """The smallest limit that a directory may have."""
    return SHARES * (_HEADER.size + block_bytes)


def _files(folder: str) -> tuple[list[tuple[int, int, Path]], int]:
    """When each file of ours in a folder was used, its bytes and its path, and how many others there are."""
    files, num_foreign = [], 0
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return [], 0
    except PermissionError:  # another user's
        return [], 1
    for entry in entries:
        if not (_FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
            num_foreign += 1
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if entry.name.endswith(".tmp") and status.st_mtime < time.time() - _STALE_S:
            Path(entry.path).unlink(missing_ok=True)
        else:
            files.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
    return files, num_foreign

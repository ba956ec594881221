"""The prefix cache's directory as the engine uses it: nothing here raises, and nobody waits for a write.

`load` is for any thread that can be kept waiting; `save` and `discard` are for the executor's; one thread of
its own writes and deletes. Where the disk is behind, blocks are dropped; where it refuses, that is said once
for each kind of failure, and the blocks are computed instead.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from octavo.worker.block_files import BlockFiles, DamagedFile, Payload

log = logging.getLogger("octavo")

_MOST_QUEUED_BYTES = 256 * 2**20  # to be written
_MOST_LOADED_BYTES = 2**30  # that somebody holds


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Blocks since the start."""

    saved: int = 0  # written
    loaded: int = 0
    dropped: int = 0  # not written, since the disk is behind or refuses
    damaged: int = 0  # whose file was, and is deleted


@dataclass(frozen=True, slots=True)
class _Job:
    """A block to write, or one to delete where there is no payload."""

    digest: bytes
    used_ns: int
    payload: Payload | None


class DiskTier:
    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        # What was loaded and that somebody still holds: who needs the same is given the same.
        self._loaded: WeakValueDictionary[bytes, Payload] = WeakValueDictionary()
        self._said: set[object] = set()
        self._num_saved = self._num_loaded = self._num_dropped = self._num_damaged = 0
        self._changed = threading.Condition()  # guards what follows
        self._jobs: deque[_Job] = deque()
        self._queued_bytes = 0
        self._closed = self._given_up = False
        self._thread = threading.Thread(target=self._run, name="octavo-disk-tier", daemon=True)
        self._thread.start()

    def counts(self) -> DiskCounts:
        return DiskCounts(self._num_saved, self._num_loaded, self._num_dropped, self._num_damaged)

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for it, sound or not."""
        return self._files.has(digest)

    def load(self, digests: Sequence[bytes], until_s: float) -> list[Payload]:
        """The payloads of the leading ones that have a sound file, as far as there is time until `until_s`
        (of `time.monotonic()`), and as callers do not hold too much already. They are not to be changed."""
        payloads: list[Payload] = []
        for digest in digests:
            payload = self._loaded.get(digest)
            if payload is None:
                held_bytes = (len(self._loaded) + 1) * self._files.block_bytes
                if time.monotonic() >= until_s or held_bytes > _MOST_LOADED_BYTES:
                    break
                payload = self._read(digest)
                if payload is None:
                    break
                self._loaded[digest] = payload
            payloads.append(payload)
        self._num_loaded += len(payloads)
        now_ns = time.time_ns()
        for index, digest in enumerate(digests[: len(payloads)]):
            self._files.touch(digest, now_ns - index)
        return payloads

    def take(self, digest: bytes) -> Payload:
        """What `load` gave somebody who still holds it. Raises `LookupError` when nobody does, and there is
        no sound file either."""
        payload = self._loaded.get(digest)
        if payload is None:
            payload = self._read(digest)
        if payload is None:
            raise LookupError(f"the prefix cache's directory has no sound file for block {digest.hex()}")
        return payload

    def save(self, blocks: Iterable[tuple[bytes, Payload]], until_s: float | None = None) -> None:
        """Has blocks written, head of a prompt first, each by its digest and its payload, which nobody may
        change any more. Does not wait for a disk that is behind, or only until `until_s`."""
        now_ns = time.time_ns()
        for index, (digest, payload) in enumerate(blocks):
            assert payload.nbytes == self._files.block_bytes
            job = _Job(digest, now_ns - index, payload)  # tails are deleted before heads
            self._num_dropped += not self._put(job, until_s)

    def discard(self, digests: Iterable[bytes]) -> None:
        """Has the files of blocks deleted, those that are yet to be written too."""
        for digest in digests:
            self._loaded.pop(digest, None)
            self._put(_Job(digest, 0, None))

    def close(self, timeout_s: float) -> None:
        """Ends the thread; what waits to be written is, for so long at most. What was loaded stays valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._given_up = True

    def _put(self, job: _Job, until_s: float | None = None) -> bool:
        num_bytes = 0 if job.payload is None else job.payload.nbytes
        with self._changed:
            while num_bytes and self._queued_bytes and self._queued_bytes + num_bytes > _MOST_QUEUED_BYTES:
                patience_s = 0.0 if until_s is None else until_s - time.monotonic()
                if patience_s <= 0:
                    return False
                self._changed.wait(patience_s)
            if self._closed:
                return False
            self._jobs.append(job)
            self._queued_bytes += num_bytes
            self._changed.notify_all()
        return True

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if not self._jobs or self._given_up:
                return None
            job = self._jobs.popleft()
            if job.payload is not None:
                self._queued_bytes -= job.payload.nbytes
            self._changed.notify_all()
        return job

    def _run(self) -> None:
        self._attempt("be prepared", self._prepare)
        while (job := self._next()) is not None:
            if job.payload is None:
                self._attempt("be deleted from", partial(self._files.delete, job.digest))
            elif not self._attempt("be written to", partial(self._write, job, job.payload)):
                self._num_dropped += 1
            del job  # or its payload would be kept until the next one comes

    def _prepare(self) -> None:
        directory = self._files.directory
        self._files.make_folder()
        if not self._files.is_private():
            log.warning(
                "the prefix cache's directory %s is open to others than its owner, who can tell prompts from "
                "what is in it, or change answers; chmod 700 closes it",
                directory,
            )
        self._tidy()

    def _tidy(self) -> None:
        num_foreign = self._files.tidy()
        if num_foreign and self._is_news("foreign"):
            log.warning(
                "the prefix cache's directory %s has %d entries that are not the cache's: they are left "
                "alone, and do not count towards its size",
                self._files.directory,
                num_foreign,
            )

    def _write(self, job: _Job, payload: Payload) -> None:
        if self._files.is_due:
            self._tidy()
        self._num_saved += self._files.write(job.digest, payload, job.used_ns)

    def _read(self, digest: bytes) -> Payload | None:
        try:
            return self._files.read(digest)
        except OSError as error:
            self._complain("be read from", error)
        except DamagedFile:
            self._num_damaged += 1
            if self._is_news("damaged"):
                log.warning(
                    "%s is damaged, or is not what its name says: it is deleted, and its block is computed "
                    "instead. Further ones are not logged",
                    self._files.path(digest),
                )
            self._attempt("be deleted from", partial(self._files.delete, digest))
        return None

    def _attempt(self, what: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except OSError as error:
            self._complain(what, error)
            return False
        return True

    def _complain(self, what: str, error: OSError) -> None:
        if self._is_news((what, error.errno)):
            log.warning(
                "the prefix cache's directory %s cannot %s: %s; blocks are computed instead. Further "
                "failures of this kind are not logged",
                self._files.directory,
                what,
                error.strerror or error,
            )

    def _is_news(self, kind: object) -> bool:
        is_news = kind not in self._said
        self._said.add(kind)
        return is_news

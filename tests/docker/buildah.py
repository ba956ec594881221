"""Calls buildah on a storage of its own, as a machine without a container engine can: isolated by chroot.

Used by `image` and `image_checks`.
"""

import os
import subprocess
from pathlib import Path


class Failed(Exception):
    """A call of buildah did not succeed; the text has its last lines."""


class Buildah:
    """Images and containers under `storage`, which nothing else knows of."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._prefix = ["buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run")]
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *arguments: str, log: Path | None = None) -> str:
        """What it printed, without the last newline; nothing where that went to `log`. Raises `Failed`."""
        with (log or Path(os.devnull)).open("wb") as output:
            ran = subprocess.run(
                [*self._prefix, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if log is None else output,
                stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
                env=self._environment,
                check=False,
            )
        if ran.returncode:
            said = ran.stderr if log is None else log.read_bytes()
            lines = said.decode(errors="replace").strip().splitlines()[-30:]
            raise Failed(f"buildah {arguments[0]} ended with {ran.returncode}:\n" + "\n".join(lines))
        return (ran.stdout or b"").decode().strip()

    def has(self, image: str) -> bool:
        listed = self("images", "--all", "--format", "{{.Name}}:{{.Tag}}").splitlines()
        return image in listed

    def unmount(self) -> None:
        """Takes away what buildah may have left mounted below its storage, so that it can be deleted."""
        below = f"{self._storage.resolve()}/"
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in sorted((place for place in mounted if place.startswith(below)), reverse=True):
            subprocess.run(["umount", place], check=False)

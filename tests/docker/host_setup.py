"""What this machine knows about package sources, given to an image's build without a trace in the image.

Owns the translation of pip's effective configuration into one file and the folders that it points to, and of
apt's sources into mounts. Used by `image`; nothing about any particular machine is written down here.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

_PLACE = re.compile(r"(?:file://)?(/[^\s,]+)")
_FILES = "/mnt/pip"  # where the files that pip is pointed to lie during the build
_RELEASE = "bookworm"  # of the Dockerfile's base


def pip_settings(listing: str) -> dict[str, str]:
    """`pip config list` as option to value. What the environment says replaces a file's, as in pip; options
    that may be given several times are added up, which finds no less."""
    found: dict[str, str] = {}
    for line in listing.splitlines():
        name, _, quoted = line.partition("=")
        value = quoted.strip("'\"").replace("\\n", " ").strip()
        option = name.rpartition(".")[2].replace("_", "-")
        if option in ("find-links", "extra-index-url", "trusted-host") and option in found:
            value = f"{found[option]} {value}" if value not in found[option].split() else found[option]
        found[option] = value
    return found


def pip_mounts(settings: dict[str, str], folder: Path) -> list[str]:
    """Mounts (`from:to:ro`): a pip.conf written into `folder`, and every local place that it names.

    Files go along as copies, since a package of the base may want to write to where they lie here (a CA
    bundle); folders at their own paths. An index may keep its packages beside it, so its parent is mounted.
    """
    files = folder / "pip"
    files.mkdir(exist_ok=True)
    places: set[Path] = set()
    lines = ["[global]"]
    for option, value in sorted(settings.items()):
        words = []
        for word in value.split():
            match = _PLACE.fullmatch(word)
            place = Path(match[1]) if match else None
            if place is not None and place.is_file():
                shutil.copyfile(place, files / place.name)
                word = f"{_FILES}/{place.name}"
            elif place is not None and place.is_dir():
                places.add(place.parent if word.startswith("file:") else place)
            words.append(word)
        lines.append(f"{option} = {' '.join(words)}")
    (files / "pip.conf").write_text("\n".join([*lines, ""]))
    outermost = sorted(place for place in places if not any(other in place.parents for other in places))
    return [
        f"{files}:{_FILES}:ro",
        f"{files}/pip.conf:/etc/pip.conf:ro",
        *(f"{place}:{place}:ro" for place in outermost),
    ]


def apt_mounts() -> list[str]:
    """apt's own configuration, where this machine is of the base's Debian release; else none."""
    system = Path("/etc/os-release").read_text()
    if f"VERSION_CODENAME={_RELEASE}" not in system or "ID=debian" not in system:
        return []
    places = [Path("/etc/apt"), Path("/usr/share/keyrings")]
    return [f"{place}:{place}:ro" for place in places if place.is_dir()]


def mirror() -> str | None:
    """Where this machine's apt finds the release; None leaves it to debootstrap."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    ran = subprocess.run([*command, f"Codename: {_RELEASE}"], capture_output=True, text=True, check=False)
    return next(iter(ran.stdout.split()), None)


def mounts(folder: Path) -> list[str]:
    """All that a build needs, as values of `--volume`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [*pip_mounts(pip_settings(listing), folder), *apt_mounts()]

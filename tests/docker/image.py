"""Builds `docker/Dockerfile.cpu` without a Docker engine, runs what comes out, and looks whether it is right.

Used by `make image-test`; needs root, buildah and debootstrap. The base image is made by debootstrap and
committed under the name that the Dockerfile asks for. All of it lies in one folder under build/, which is
removed at the end; --keep leaves it. `image_checks` has what is looked at.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import host_setup
import image_checks
from buildah import Buildah, Failed

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile.cpu"
NEEDED = {"buildah": "buildah", "debootstrap": "debootstrap"}  # program and Debian's package


def base_name() -> str:
    """The image that the Dockerfile builds on, such as debian:12.12-slim."""
    tag = re.search(r"^ARG DEBIAN=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert tag is not None
    return f"debian:{tag[1]}"


def make_base(buildah: Buildah, folder: Path) -> None:
    system = folder / "base"
    command = ["debootstrap", "--variant=minbase", "bookworm", str(system)]
    with (folder / "debootstrap.log").open("wb") as log:
        subprocess.run(
            [*command, *filter(None, [host_setup.mirror()])], check=True, stdout=log, stderr=subprocess.STDOUT
        )
    shutil.rmtree(system / "var/lib/apt/lists", ignore_errors=True)
    for package in (system / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(system), "/")
    buildah("config", "--cmd", "bash", container)
    buildah("commit", "--quiet", container, f"docker.io/library/{base_name()}")
    buildah("rm", container)
    shutil.rmtree(system)


def build(buildah: Buildah, folder: Path, target: str, name: str, pip_args: str) -> None:
    """Builds a stage, with this machine's package sources mounted."""
    command = ["bud", "--isolation", "chroot", "--pull-never", "--format", "docker", "--target", target]
    command += ["--file", str(DOCKERFILE), "--tag", name, "--build-arg", f"PIP_ARGS={pip_args}"]
    for mount in host_setup.mounts(folder):
        command += ["--volume", mount]
    buildah(*command, str(ROOT), log=folder / f"{target}.log")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the folder with the images")
    parser.add_argument("--storage", type=Path, help="a folder left by --keep, whose images are used")
    parser.add_argument("--pip-args", default=os.environ.get("PIP_ARGS", ""), help="more options for pip")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        needs = f"apt-get install {' '.join(missing)}" if missing else "root, for chroot and mounts"
        print(f"error: the image test needs {needs}", file=sys.stderr)
        return 1
    (ROOT / "build").mkdir(exist_ok=True)
    folder = (
        options.storage.resolve()
        if options.storage
        else Path(tempfile.mkdtemp(prefix="image-test-", dir=ROOT / "build"))
    )
    folder.chmod(0o755)  # the image's user must get through
    started = time.monotonic()
    buildah = Buildah(folder / "storage")
    try:
        if not buildah.has(f"docker.io/library/{base_name()}"):
            print(f"making the base image {base_name()}", flush=True)
            make_base(buildah, folder)
        images = {}
        for target in ("server", "loadtest"):
            images[target] = f"localhost/octavo:{target}"
            if not buildah.has(images[target]):
                print(f"building the stage {target}", flush=True)
                build(buildah, folder, target, images[target], options.pip_args)
        figures = image_checks.check_loadtest(buildah, images["loadtest"], folder)
        figures |= image_checks.check(buildah, images["server"], folder)
        figures["whole_test_s"] = round(time.monotonic() - started, 1)
        print(json.dumps(figures, indent=1))
        if options.json:
            options.json.write_text(json.dumps(figures))
    except (image_checks.Wrong, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if options.keep or options.storage:
            print(f"left: {folder}")
        else:
            buildah.unmount()
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

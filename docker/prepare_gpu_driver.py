"""Compiles, on a machine without a GPU, the C module that the Triton language loads on one.

Run by Dockerfile.gpu with $TRITON_CACHE_DIR set. Triton compiles `cuda_utils` with the system's compiler when
it first meets a GPU, and keeps it in its cache under a digest of the source; made here, no compiler is needed
later. It is linked to an empty libcuda, and cannot be loaded before the real one is there.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "gcc",
            "-shared",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            f"{folder}/libcuda.so.1",
            "-xc",
            "/dev/null",
        ]
        subprocess.run(command, check=True)
        try:
            compile_module_from_src(
                src=(Path(driver.__file__).parent / "driver.c").read_text(),
                name="cuda_utils",
                library_dirs=[driver.libdevice_dir, folder],
                include_dirs=driver.include_dirs,
                libraries=driver.libraries,
            )
        except ImportError as error:  # it is in the cache by then
            print(f"compiled, and not to be loaded without a GPU's driver: {error}")
    made = sorted(Path(knobs.cache.dir).rglob("cuda_utils*"))
    print(*made, sep="\n")
    return 0 if len(made) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())

"""Programs that some tests need and Python packages do not bring: a browser, npm, an image builder.

A test without its program is skipped and says how to get it; in CI it fails, so that no run is green for want
of something.
"""

import os
import shutil

import pytest


def tool(name: str, package: str) -> str:
    """The path of a program. `package` is Debian's that has it."""
    path = shutil.which(name)
    if path is None:
        reason = f"needs {name}: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path

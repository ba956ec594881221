"""`octavo build-kernels`: compiles the CPU kernels ahead, for a machine that has no compiler or cannot write.

Owns the command's argument, what it prints, and its exit status: 0 when every instruction set is compiled, 1
when one could not be. The `octavo` script finds this command by its entry point in the group
`octavo.commands`. Needs no extra, and never imports torch.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo_kernels.cpu import build


def build_kernels(
    folder: Annotated[
        Path | None,
        typer.Argument(help="What OCTAVO_CACHE will be where they run; by default, this machine's cache."),
    ] = None,
) -> None:
    """Compile the CPU kernels of every instruction set ahead, with the C compiler that CC names."""
    try:
        into = build.cache_folder(folder)
        for name in build.FLAGS:
            print(build.build(name, into), flush=True)
    except build.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None

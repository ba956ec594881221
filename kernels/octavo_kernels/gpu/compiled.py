"""The kernels compiled ahead of time, for GPUs that need not be there, and what the compiled code shows.

A kernel's module offers `forms(capability)`: the specialisations of it that are worth looking at. A *hot* one
may not spill registers, and none may ask for more shared memory than the chip has. The process must not have
TRITON_INTERPRET set.

python -m octavo_kernels.gpu.compiled [--capability 90] [--only paged_attention] [--json]
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo_kernels.gpu import chips

CAPABILITIES = (80, 90, 100)
MODULES = ("paged_attention", "kv_store", "rms_norm", "activation", "block_copy", "row_chunks", "sampling")

_MATRIX_INSTRUCTIONS = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}
# Bytes that one thread moves at once; what goes to shared memory asynchronously, and what to registers.
_ASYNCHRONOUS = re.compile(
    r"cp\.async\.c[ag]\.shared\.global[\w:.]* \[[^]]*\], \[[^]]*\], (?:0x)?([0-9a-f]+)"
)
_LOAD = re.compile(r"ld\.global[\w:.]*?(?:\.v(\d))?\.b(\d+) ")


@dataclass(frozen=True)
class Form:
    """One specialisation of a kernel. `types` has every argument that is no constant: `*bf16`, `i32`, `fp32`,
    or `*bf16:16` and `i32:16` for one that is a multiple of 16, as Triton finds of the actual ones at run
    time (an integer argument that is 1 belongs to the constants)."""

    name: str
    kernel: Any  # a function under triton.jit
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    hot: bool = True


@dataclass(frozen=True)
class Compiled:
    """What became of a form on one chip."""

    form: str
    capability: int
    hot: bool
    warps: int
    stages: int
    registers: int  # of a thread
    spill_bytes: int  # of a thread's stack: nothing else is put there
    shared_bytes: int  # of a program
    matrix: str  # the matrix instructions used, or ""
    widest_load_bytes: int  # of a thread, from global memory
    asynchronous_bytes: int  # the widest copy to shared memory that no thread waits for; 0 is none
    is_trap: bool  # all that Triton leaves of a kernel that does not fit into the memory of a chip's sums

    @property
    def programs_per_core(self) -> int:
        """That its registers, shared memory and warps have room for."""
        threads = 32 * self.warps
        registers = -(-self.registers // 8) * 8 * threads
        shared = self.shared_bytes + chips.SHARED_RESERVED_BYTES
        limits = chips.CORE_REGISTERS // registers, chips.CORE_SHARED_BYTES[self.capability] // shared
        return min(*limits, chips.CORE_THREADS // threads, chips.CORE_PROGRAMS)

    @property
    def fault(self) -> str | None:
        if self.is_trap:
            return f"{self.form} does not fit on {self.capability}"
        if self.hot and self.spill_bytes:
            return f"{self.form} spills {self.spill_bytes} bytes on {self.capability}"
        if self.shared_bytes > chips.SHARED_BYTES[self.capability]:
            return f"{self.form} takes {self.shared_bytes} bytes of shared memory on {self.capability}"
        return None


def compile_form(form: Form, capability: int) -> tuple[Compiled, str]:
    """Also returns the PTX."""
    signature, attributes = {}, {}
    for index, name in enumerate(form.kernel.arg_names):
        if name in form.constants:
            signature[name] = "constexpr"
            continue
        signature[name], _, multiple = form.types[name].partition(":")
        if multiple:
            attributes[(index,)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(form.kernel, signature, dict(form.constants), attributes)
    options = {"num_warps": form.warps, "num_stages": form.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = kernel.asm["ptx"]
    registers, stack = _resources(kernel.asm["cubin"])
    asynchronous = [int(size, 16) for size in _ASYNCHRONOUS.findall(ptx)]
    loads = [int(count or 1) * int(bits) // 8 for count, bits in _LOAD.findall(ptx)]
    found = Compiled(
        form=form.name,
        capability=capability,
        hot=form.hot,
        warps=form.warps,
        stages=form.stages,
        registers=registers,
        spill_bytes=stack,
        shared_bytes=kernel.metadata.shared,
        matrix=next((name for name, text in _MATRIX_INSTRUCTIONS.items() if text in ptx), ""),
        widest_load_bytes=max(loads, default=0),
        asynchronous_bytes=max(asynchronous, default=0),
        is_trap="\ttrap;" in ptx,
    )
    return found, ptx


def compile_all(capability: int, only: str = "") -> Iterator[Compiled]:
    """All forms whose module or name has `only` in it."""
    for module in MODULES:
        for form in import_module(f"octavo_kernels.gpu.{module}").forms(capability):
            if only in f"{module} {form.name}":
                yield compile_form(form, capability)[0]


def _resources(cubin: bytes) -> tuple[int, int]:
    """A thread's registers, and the bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
    assert found, shown
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def table(found: list[Compiled]) -> str:
    """In Markdown, a row for a form. A cell: registers of a thread, KiB of shared memory of a program, how
    many of it a core holds, matrix instructions, and bytes of the widest load."""
    capabilities = sorted({one.capability for one in found})
    rows: dict[str, dict[int, Compiled]] = {}
    for one in found:
        rows.setdefault(one.form, {})[one.capability] = one
    lines = ["| form | " + " | ".join(map(str, capabilities)) + " |", "|---" * (1 + len(capabilities)) + "|"]
    for form, cells in rows.items():
        shown = (_cell(cells[capability]) if capability in cells else "" for capability in capabilities)
        lines.append(f"| {form} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(one: Compiled) -> str:
    load = f"{one.asynchronous_bytes} async" if one.asynchronous_bytes else f"{one.widest_load_bytes}"
    parts = [f"{one.registers} r", f"{one.shared_bytes / 1024:.0f} K", f"{one.programs_per_core} a core"]
    parts += [one.matrix] if one.matrix else []
    parts += [f"{load} B"]
    parts += [f"spills {one.spill_bytes} B"] if one.spill_bytes else []
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, nargs="*", default=CAPABILITIES)
    parser.add_argument("--only", default="", help="forms whose module or name has this in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [one for capability in args.capability for one in compile_all(capability, args.only)]
    print(json.dumps([asdict(one) for one in found], indent=1) if args.json else table(found))
    faults = [one.fault for one in found if one.fault]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()

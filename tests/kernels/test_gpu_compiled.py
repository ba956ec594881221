"""What the compiler makes of the GPU kernels, for chips that need not be there."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from octavo_kernels.gpu import compiled
from octavo_kernels.gpu.compiled import Compiled

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=compiled.CAPABILITIES)
def found(request: pytest.FixtureRequest) -> list[Compiled]:
    """All forms on one chip, by the command, which fails where one is at fault."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octavo_kernels.gpu.compiled", "--json", "--capability"]
    ran = subprocess.run(
        [*command, str(request.param)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    return [Compiled(**one) for one in json.loads(ran.stdout)]


def test_forms(found: list[Compiled]) -> None:
    names = [one.form for one in found]
    assert len(set(names)) == len(names)
    assert not [one.fault for one in found if one.fault]
    for kind in ("decode", "prefill"):
        for cache in ("bfloat16", "int8", "float8"):
            for head_size in (64, 128, 256):
                assert f"{kind} {cache} {head_size}" in names


def test_hot_kernels_move_16_bytes_a_thread(found: list[Compiled]) -> None:
    narrow = [
        one.form for one in found if one.hot and max(one.widest_load_bytes, one.asynchronous_bytes) < 16
    ]
    assert not narrow


def test_attention_fetches_ahead_and_multiplies_by_matrix_instructions(found: list[Compiled]) -> None:
    """Plain caches are fetched into shared memory with no thread waiting. The chip's best products need 64
    rows, which decoding has not."""
    by_rows = {80: "mma", 90: "wgmma", 100: "tcgen05"}
    for one in found:
        kind, _, rest = one.form.partition(" ")
        if kind in ("decode", "prefill") and one.hot:
            assert one.matrix == ("mma" if kind == "decode" else by_rows[one.capability]), one.form
            assert one.asynchronous_bytes == (0 if "int8" in rest or "float8" in rest else 16), one.form


def test_decoding_keeps_enough_bytes_under_way(found: list[Compiled]) -> None:
    """What an H200's latency asks for, with tiles of K and V: the programs of a core, one tile each."""
    for one in found:
        if one.form.startswith("decode bfloat16") and one.hot and one.capability >= 90:
            assert one.programs_per_core >= 3, one.form


def test_what_differs_from_step_to_step_has_nothing_compiled_anew() -> None:
    """Triton would, for a 1 and for a multiple of 16, addresses too: in the middle of serving."""
    varying = {"splits", "stride_table", "num_sequences", "count"}
    anywhere = {"p_from_index", "p_to_index", "p_chosen"}
    seen = set()
    for module in compiled.MODULES:
        for form in import_module(f"octavo_kernels.gpu.{module}").forms(90):
            for parameter in form.kernel.params:
                if parameter.name in varying:
                    seen.add(parameter.name)
                    assert parameter.do_not_specialize, (form.name, parameter.name)
                if parameter.name in anywhere:
                    seen.add(parameter.name)
                    assert parameter.do_not_specialize_on_alignment, (form.name, parameter.name)
    assert seen == varying | anywhere


def test_faults() -> None:
    good = Compiled("form", 80, True, 4, 3, 128, 0, 163 * 1024, "mma", 16, 16, False)
    assert good.fault is None
    assert good.programs_per_core == 1
    assert replace(good, shared_bytes=40 * 1024, warps=8).programs_per_core == 2
    assert replace(good, spill_bytes=8).fault == "form spills 8 bytes on 80"
    assert replace(good, spill_bytes=8, hot=False).fault is None
    assert (
        replace(good, shared_bytes=163 * 1024 + 1).fault == "form takes 166913 bytes of shared memory on 80"
    )
    assert replace(good, shared_bytes=163 * 1024 + 1, capability=90).fault is None
    assert replace(good, is_trap=True).fault == "form does not fit on 80"

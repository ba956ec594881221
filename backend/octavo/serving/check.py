"""`octavo check`: says what becomes of a model repository, key by key, without starting anything.

Owns the command, the text and the JSON that it prints, and its exit status: 0 when every model would load,
1 otherwise. What it knows comes from `repository`. The `octavo` script finds this command by its entry point
in the group `octavo.commands`.
"""

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.errors import OctavoError
from octavo.serving import installation
from octavo.serving.repository import ModelReport, VersionReport, read_repository

installation.require_extra()

_LABEL_WIDTH = 14
_MOST_WIDTH = 110


def check(
    repository: Annotated[
        Path, typer.Argument(help="Folder of models, each with a config.pbtxt and version folders.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what of a repository is honoured, ignored and refused, and how much fits, without serving it."""
    try:
        reports = read_repository(repository)
    except OctavoError as error:
        if as_json:
            print(json.dumps({"would_load": False, "errors": [str(error)], "models": []}, indent=2))
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    errors = [f"{report.name}: {error}" for report in reports for error in report.all_errors()]
    if as_json:
        models = [dataclasses.asdict(report) for report in reports]
        print(json.dumps({"would_load": not errors, "errors": errors, "models": models}, indent=2))
    else:
        print("\n\n".join(describe(report) for report in reports), flush=True)
    for why in errors:
        print(f"error: {why}", file=sys.stderr)
    raise typer.Exit(1 if errors else 0)


def describe(report: ModelReport) -> str:
    """One model, as text of several lines."""
    lines = [report.name]

    def row(label: str, text: str) -> None:
        width = min(shutil.get_terminal_size((_MOST_WIDTH, 0)).columns, _MOST_WIDTH)
        indent = " " * (_LABEL_WIDTH + 2)
        lines.extend(
            textwrap.wrap(
                text,
                width,
                initial_indent=f"  {label:<{_LABEL_WIDTH}}",
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )

    def rows(label: str, reasons: Mapping[str, str]) -> None:
        for position, (name, why) in enumerate(sorted(reasons.items())):
            text = why if why.startswith(("unknown", f"'{name}'")) else f"{name}: {why}"
            row("" if position else label, text)

    if report.backend:
        row("backend", report.backend if report.ours else f"{report.backend}, which is not Octavo's to check")
    row("instances", ", ".join(report.instances) or "as the server decides")
    for note in report.notes:
        row("note", note)
    if report.parameters_honoured:
        row("parameters", _pairs(report.parameters_honoured))
    rows("  ignored", report.parameters_ignored)
    for version in report.versions:
        row("version", str(version.version))
        _describe_version(version, row, rows)
    errors = report.all_errors()
    if errors:
        row("would fail", f"{len(errors)} error{'s' if len(errors) > 1 else ''}, below")
    elif report.ours:
        row("would load", "yes")
    return "\n".join(lines)


def _describe_version(report: VersionReport, row: Any, rows: Any) -> None:
    if report.honoured:
        row("  honoured", _pairs(report.honoured))
    rows("  ignored", report.ignored)
    rows("  refused", report.refused)
    for name, place in sorted(report.adapters_refused.items()):
        row("  adapter", f"{name} ({place}): refused, LoRA adapters are not supported by this version")
    capacity = report.capacity
    if capacity is None:
        return
    row(
        "  model",
        f"{capacity['architecture']}, {capacity['num_layers']} layers, {capacity['dtype']} on "
        f"{capacity['device']}; weights of {capacity['weight_bytes'] / 2**20:,.0f} MiB, "
        f"{capacity['quantization'] or 'unquantised'}",
    )
    row(
        "  KV cache",
        f"{capacity['kv_bytes_per_token']:,} bytes a token; about {capacity['num_blocks']:,} blocks of "
        f"{capacity['block_size']} = {capacity['num_tokens']:,} tokens, limited by {capacity['limit']}",
    )
    if capacity["num_host_blocks"]:
        row(
            "  host memory",
            f"{capacity['num_host_blocks']:,} more blocks, for those that are evicted, limited by "
            f"{capacity['host_limit']}",
        )
    if capacity["directory"] is not None:
        num_bytes = capacity["directory_bytes"]
        row(
            "  directory",
            f"{capacity['directory']}; at most {num_bytes / 2**30:,.2f} GiB = "
            f"{num_bytes // capacity['kv_bytes_per_token']:,} tokens, of all models that use it",
        )
    row(
        "  concurrency",
        f"{capacity['max_concurrency']:.1f} requests of {capacity['max_model_len']:,} tokens at once",
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())

"""The `octavo` script. Its subcommands are entry points, found by name and imported when they are asked for.

Owns nothing but that. A distribution offers a command by an entry point in the group `octavo.commands` whose
object is a function that typer understands, and names the extra that the command needs, as in
`serve = "octavo.serving.cli:serve [serve]"`. This is the only way from the client package to the rest of
Octavo, and nothing of it is imported before a command runs: an installation without the extra says which one
is missing.
"""

import sys
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

import typer
from typer.core import TyperGroup

COMMAND_GROUP = "octavo.commands"
MISSING_EXTRA_STATUS = 2


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({entry.name for entry in entry_points(group=COMMAND_GROUP)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for entry in entry_points(group=COMMAND_GROUP, name=cmd_name):
            return _load(entry)
        return None


def _load(entry: EntryPoint) -> Any:
    """The command, or one that says what is missing: listing the commands must work without any extra."""
    app = typer.Typer(add_completion=False)
    try:
        app.command(entry.name)(entry.load())
    except ModuleNotFoundError as error:
        extra = next(iter(entry.extras), None)
        if extra is None or (error.name or "").startswith("octavo"):
            raise  # not an extra that is missing, but a mistake of ours
        app.command(
            entry.name,
            help=f"Not installed: pip install 'octavo\\[{extra}]'",  # help is rich markup
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_refusal(entry.name, extra, error.name or "a module"))
    return typer.main.get_command(app)


def _refusal(command: str, extra: str, missing: str) -> Any:
    def refuse() -> None:
        advice = f"pip install 'octavo[{extra}]'"
        print(f"error: octavo {command} needs {missing}, which is not installed: {advice}", file=sys.stderr)
        raise typer.Exit(MISSING_EXTRA_STATUS)

    return refuse


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {version('octavo')}")
        raise typer.Exit


_app = typer.Typer(cls=_LazyGroup, add_completion=False, no_args_is_help=True)


@_app.callback()
def _octavo(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Octavo: an LLM engine inside NVIDIA Triton Inference Server."""


def main() -> None:
    _app(prog_name="octavo")

"""What the memory system and the scheduler claim to gain, on and off side by side, one figure a command.

    python loadtest/claims.py waste                    print the table
    python loadtest/claims.py waste --write --plots    and put it into backend/docs/claims.md, with its plot

A claim stands in `CLAIMS` by its name, in the document between two marks of that name, and as a plot in
`backend/docs/claims/`.
"""

import argparse
import sys
from pathlib import Path

from claim import Claim, svg
from claim_chunked import CHUNKED, CHUNKED_CPU
from claim_prefix import PREFIX
from claim_restart import RESTART
from claim_sharing import SHARING
from claim_swap import SWAP, SWAP_ENGINE
from claim_waste import WASTE

DOCUMENT = Path(__file__).parents[1] / "backend" / "docs" / "claims.md"

CLAIMS: dict[str, Claim] = {
    "waste": WASTE,
    "prefix": PREFIX,
    "sharing": SHARING,
    "chunked": CHUNKED,
    "chunked-cpu": CHUNKED_CPU,
    "restart": RESTART,
    "swap": SWAP,
    "swap-engine": SWAP_ENGINE,
}


def put(document: str, name: str, table: str) -> str:
    """The document with a claim's table between its marks. Raises `ValueError` when it has no such marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document needs one line '{begin.strip()}' and one '{end.strip()}'")
    head, rest = document.split(begin)
    return f"{head}{begin}{table}\n{end}{rest.split(end)[1]}"


def plot_of(name: str) -> Path:
    return DOCUMENT.with_suffix("") / f"{name}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claims", nargs="+", choices=list(CLAIMS))
    parser.add_argument("--write", action="store_true", help=f"the table into {DOCUMENT.name} as well")
    parser.add_argument("--plots", action="store_true", help="and the plot beside it")
    args = parser.parse_args()
    missed = []
    for name in args.claims:
        result = CLAIMS[name].measure()
        print(result.table, flush=True)
        if not result.met:
            missed.append(name)
        if args.write:
            DOCUMENT.write_text(put(DOCUMENT.read_text(), name, result.table))
        if args.plots:
            plot_of(name).parent.mkdir(exist_ok=True)
            plot_of(name).write_text(svg(result.panels))
    if missed:
        sys.exit(f"the goal is missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()

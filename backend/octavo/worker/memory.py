"""How much memory this process may still take: the machine's, or its control group's where that is less."""

from pathlib import Path

_UNLIMITED = 2**60  # version 1 of control groups writes a number near 2**63 for "no limit"


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes; `root` is where /proc and /sys are looked for."""
    available = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    for group in control_groups(root, "memory"):
        limit_file, usage_file = group / "memory.max", group / "memory.current"
        if not limit_file.exists():
            limit_file, usage_file = group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
        if not (limit_file.exists() and usage_file.exists()):
            continue
        limit = limit_file.read_text().strip()
        if limit == "max" or int(limit) > _UNLIMITED:
            continue
        # Pages of files that nobody has open are counted as used, but given up on demand.
        cached = _fields(group / "memory.stat").get("inactive_file", 0)
        available = min(available, int(limit) - int(usage_file.read_text()) + cached)
    return max(available, 0)


def readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) >= 2}


def control_groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's group and of those around it, whose limits hold as well."""
    folders = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = mount / path.lstrip("/")
            folders += [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return folders

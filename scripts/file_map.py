"""Write the map of the project's files, docs/map.md: each with the first line of its docstring.

    python scripts/file_map.py            # bring docs/map.md up to date

A test compares the map with the files, so no new file can be forgotten.
"""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("modelzoo", "sharding", "compile", "runtime", "scripts")
MAP = ROOT / "docs" / "map.md"


def main() -> None:
    MAP.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page: a list of folders and files with their purposes."""
    lines = ["# Map of the files", "", "Written by `scripts/file_map.py`."]
    folder = None
    for path in sorted(_tracked(), key=lambda path: (_floor(path), path.parent.parts, path.name)):
        if path.parent != folder:
            folder = path.parent
            purpose = _purpose(ROOT / folder / "__init__.py")
            lines += ["", f"**`{folder.as_posix()}/`** {purpose}".rstrip(), ""]
        if path.name != "__init__.py":
            lines.append(f"- `{path.name}` {_purpose(ROOT / path)}")
    return "\n".join(lines) + "\n"


def _tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", *FLOORS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [Path(name) for name in names if name.endswith(".py") or "." not in Path(name).name]


def _floor(path: Path) -> int:
    return FLOORS.index(path.parts[0])


def _purpose(path: Path) -> str:
    """Return the first line of a module's docstring, or the first comment of a script."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


if __name__ == "__main__":
    main()

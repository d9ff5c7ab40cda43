"""Write the README's tree of files: each with the first line of its docstring.

    python scripts/readme_tree.py            # bring README.md up to date

A test compares, so a new file cannot be forgotten.
"""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("modelzoo", "sharding", "compile", "runtime", "scripts")
START, END = "<!-- tree -->\n", "<!-- end of tree -->\n"


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(with_tree(text), encoding="utf-8")


def with_tree(readme: str) -> str:
    """The README with its tree replaced by what the files say now."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}{tree()}{END}{after}"


def tree() -> str:
    """A Markdown list of folders and files with their purposes."""
    lines: list[str] = []
    folder = None
    for path in sorted(_tracked(), key=lambda path: (_floor(path), path.parent.parts, path.name)):
        if path.parent != folder:
            folder = path.parent
            purpose = _purpose(ROOT / folder / "__init__.py")
            lines += ["", f"**`{folder.as_posix()}/`** {purpose}".rstrip(), ""]
        if path.name != "__init__.py":
            lines.append(f"- `{path.name}` {_purpose(ROOT / path)}")
    return "\n".join(lines).lstrip() + "\n"


def _tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--", *FLOORS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [Path(name) for name in names if name.endswith(".py") or "." not in Path(name).name]


def _floor(path: Path) -> int:
    return FLOORS.index(path.parts[0])


def _purpose(path: Path) -> str:
    """The first line of a module's docstring, or the first comment of a script."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return next(line[2:] for line in text.splitlines() if line.startswith("# "))


if __name__ == "__main__":
    main()

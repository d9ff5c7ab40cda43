"""Write the README's table of models: what each family answers to, and how often it was compared.

    python scripts/conformance_table.py            # bring README.md up to date

A row follows from the registry of families, the first line of the family's docstring ("name: what
is notable") and the conformance cases of the tests. A test compares, so a family cannot be
forgotten.
"""

import inspect
import sys
from collections import Counter
from pathlib import Path

from noria.modelzoo.families import registry
from noria.modelzoo.families.family import Family

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from conformance import CASES  # noqa: E402  (the tests are no package)

START, END = "<!-- models -->\n", "<!-- end of models -->\n"
HEAD = """\
| model | `architectures` of config.json | GGUF architecture | compared configurations | notable |
|---|---|---|--:|---|
"""


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(readme: str) -> str:
    """The README with its table replaced by what the families and cases say now."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    counts = Counter(case.family for case in CASES)
    rows = [_row(family, counts[family.name]) for family in registry.FAMILIES]
    return f"{before}{START}{HEAD}{''.join(rows)}{END}{after}"


def _row(family: Family, num_cases: int) -> str:
    model, _, notable = _docstring(family).split("\n")[0].rstrip(".").partition(": ")
    in_gguf = {other.gguf_name for other in registry.FAMILIES if other.gguf_options is not None}
    is_in_gguf = family.gguf_name in in_gguf
    gguf = f"`{family.gguf_name}`" if is_in_gguf else "no"
    return f"| {model} | `{family.architecture}` | {gguf} | {num_cases} | {notable} |\n"


def _docstring(family: Family) -> str:
    """Of the module that holds the family."""
    modules = filter(inspect.ismodule, vars(registry).values())
    found = next(m for m in modules if any(value is family for value in vars(m).values()))
    return found.__doc__ or ""


if __name__ == "__main__":
    main()

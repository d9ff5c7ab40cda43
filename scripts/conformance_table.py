"""Write the table of models in docs/models.md: names, compared and published configurations.

    python scripts/conformance_table.py            # bring docs/models.md up to date

A row comes from the registry of families, the first line of the docstring of the family or of its
module ("name: notable features"), the tests' conformance cases and the published configurations
that the tests read. A test compares the table with the page, so no family can be forgotten.
"""

import ast
import inspect
import itertools
import sys
from collections import Counter
from pathlib import Path

from noria.modelzoo.families import registry
from noria.modelzoo.families.family import Family
from noria.modelzoo.families.wholes import WHOLES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))

from conformance import CASES  # noqa: E402  (the tests are no package)
from embedder_cases import CASES as EMBEDDERS  # noqa: E402
from published_configs import published_configs  # noqa: E402

START, END = "<!-- models -->\n", "<!-- end of models -->\n"
HEAD = (
    "| model | `architectures` of config.json | GGUF architecture | compared configurations "
    "| published ones read | notable |\n|---|---|---|--:|--:|---|\n"
)


WHOLE_HEAD = "| with images | its text part | published ones read |\n|---|---|---|\n"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_table(page: str) -> str:
    """Return the page with a new table from the families and cases."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    counts = Counter(case.family for case in (*CASES, *EMBEDDERS))
    rows = [
        _row(family, counts[family.name]) for family in (*registry.FAMILIES, *registry.ENCODERS)
    ]
    return f"{before}{START}{HEAD}{''.join(rows)}{_wholes()}{END}{after}"


def _wholes() -> str:
    """Return the table of models of more than text."""
    rows = []
    for whole in WHOLES:
        texts = " or ".join(f"`{family.architecture}`" for family in whole.texts.values())
        rows.append(f"| `{whole.architecture}` | {texts} | {_published({whole.name})} |\n")
    return f"\n{WHOLE_HEAD}{''.join(rows)}"


def _row(family: Family, num_cases: int) -> str:
    model, _, notable = _docstring(family).split("\n")[0].rstrip(".").partition(": ")
    in_gguf = {other.gguf_name for other in registry.FAMILIES if other.gguf_options is not None}
    is_in_gguf = family.gguf_name in in_gguf
    gguf = f"`{family.gguf_name}`" if is_in_gguf else "no"
    published = _published({family.name})
    columns = (model, f"`{family.architecture}`", gguf, num_cases, published, notable)
    return f"| {' | '.join(map(str, columns))} |\n"


def _published(names: set[str]) -> str:
    """Return how many published configurations of these types are read."""
    found = [published for published in published_configs() if published.model_type in names]
    num_read = sum(published.refused is None for published in found)
    return f"{num_read} of {len(found)}" if found else "none found"


def _docstring(family: Family) -> str:
    """Return the docstring of the family, or of the module that defines it alone."""
    modules = filter(inspect.ismodule, vars(registry).values())
    found = next(m for m in modules if any(value is family for value in vars(m).values()))
    name = next(name for name, value in vars(found).items() if value is family)
    body = ast.parse(inspect.getsource(found)).body
    for assignment, following in itertools.pairwise(body):
        is_its = isinstance(assignment, ast.Assign) and ast.unparse(assignment.targets[0]) == name
        if is_its and isinstance(following, ast.Expr):
            return ast.literal_eval(following.value)
    return found.__doc__ or ""


if __name__ == "__main__":
    main()

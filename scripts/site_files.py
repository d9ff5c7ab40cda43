"""A hook of mkdocs: adds the reports in benchmarks/ to the site, so that links to them work.

Pages link to `../benchmarks/NAME`, as the files lie in the repository. The site has these files
below its root, so the hook shortens such links by one folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks"
SUFFIXES = {".md", ".json", ".png"}
_LINK = re.compile(r"\]\(((?:\.\./)+)benchmarks/")


def on_files(files: Files, config: Any) -> Files:
    """Add every report, and the data and pictures that reports link to."""
    for path in sorted(REPORTS.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            name = path.relative_to(ROOT).as_posix()
            report = File.generated(config, name, abs_src_path=str(path))
            report.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(report)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Shorten links to reports: the site's root is `docs/`, which is one folder further down."""
    return _LINK.sub(lambda link: f"]({link[1][3:]}benchmarks/", markdown)

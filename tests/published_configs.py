"""Published configurations of real models, and the expected result for each.

`published_configs.jsonl` holds one to a line: `config` with its own keys and values (models that no
family knows may lack some), `source` for where it was found, `refused` for the beginning of the
error that it deserves, as a pattern, and `unread` for the keys that are noted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PublishedConfig:
    """One configuration and its expected result."""

    name: str
    source: str
    config: Mapping[str, Any]
    refused: str | None = None
    unread: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return self.config["model_type"]


def published_configs() -> list[PublishedConfig]:
    """All of them, by model type."""
    path = Path(__file__).with_suffix(".jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [PublishedConfig(**{**e, "unread": tuple(e.get("unread", ()))}) for e in entries]

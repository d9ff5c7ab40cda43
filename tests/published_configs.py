"""Published configurations of real models, and the expected result for each.

Each line of `published_configs.jsonl` is one configuration: `config` has its keys and values (some
may be absent for models of unknown families), `source` says where it is from, `refused` is a
pattern for the beginning of the expected error, and `unread` lists the keys that are noted.
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
    """Return all configurations, in the order of model types."""
    path = Path(__file__).with_suffix(".jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [PublishedConfig(**{**e, "unread": tuple(e.get("unread", ()))}) for e in entries]

"""The forms of answers that a plan has automata for: the table `[structured]`.

The graphs depend on the sizes alone, and the contents of the tables are arguments. The hashes tell
which rows the plan can serve. Knows nothing of schemas, models or devices.
"""

from dataclasses import dataclass
from re import fullmatch

from ...modelzoo.config_values import check_count
from ...modelzoo.errors import UserError
from ..plan_tables import PlanTable
from .grid_values import check_list

MAX_LEVELS = 8
"""Maximum number of masks of one state, for different numbers of tokens that are left."""
TOKENS_OF_BLOCK = 4096
"""The tokens of a block of a mask: 128 words of 32 bits, as many as a TPU reads at once."""
CLASSES_OF_BLOCK = 32
"""The number of token classes in a block of a state's moves."""


@dataclass(frozen=True)
class StructuredGrid(PlanTable, name="structured"):
    """The sizes of the tables of all automata together."""

    states: int
    """The number of states of all automata, plus one for rows without a form. Unit: states."""
    classes: int
    """The largest number of classes of tokens in one automaton. Unit: classes."""
    masks: int
    """The number of masks of all automata, plus one that allows every token. Unit: masks."""
    move_blocks: int
    """The number of different blocks of moves. Unit: blocks."""
    mask_blocks: int
    """The number of different blocks of masks. Unit: blocks."""
    schemas: tuple[str, ...]
    """The hashes of the forms that rows may ask for."""

    def __post_init__(self):
        """Check the fields; ValueError names the wrong key."""
        for name in ("states", "classes", "masks", "move_blocks", "mask_blocks"):
            check_count(f"structured.{name}", getattr(self, name))
        schemas = tuple(check_list("structured.schemas", self.schemas))
        object.__setattr__(self, "schemas", schemas)
        is_hash = [isinstance(s, str) and fullmatch("sha256:[0-9a-f]{64}", s) for s in schemas]
        if not schemas or not all(is_hash) or len(set(schemas)) < len(schemas):
            raise UserError(
                f"structured.schemas: expected at least one hash, as sha256: and 64 digits, and "
                f"each one once, got {list(schemas)[:3]}."
            )

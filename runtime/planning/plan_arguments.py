"""The arguments of an `LLM` about its plan: they make a plan, or must agree with a given one.

The plan that they make has a ladder of buckets, whose lengths double up to the longest row, as the
lengths of later prompts are unknown. Forms of answers and adapters get room in a plan that has none
for them. The kinds of all arguments of `LLM` are checked here too, before anything is read. Does
not know about parameters or requests. Guarantees: an argument that a given plan decides is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any

from ...compile.expert_plan import ExpertPlan, default_experts
from ...compile.grids.default_grid import ladder_grid, slots_that_fit
from ...compile.grids.embed_grid import embed_ladder
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.targets import Target
from ...modelzoo.config_values import check_choice, check_count
from .. import session
from ..adapters.adapter_set import AdapterSet
from ..checkpoint import ModelFiles
from ..checkpoint.published_numbers import keep_published
from ..devices.graph_memory import device_bytes
from ..errors import UserError
from ..files.layout_files import read_layout
from ..plans import plan_checks
from ..structured.structures import Form, Structures
from ..text.load_tokenizer import load_tokenizer
from .embedding_plan import aims
from .target_work import bytes_for_pages, in_memory_of, room_on_accelerator, work_of

DEFAULT_MAX_LENGTH = 2048
DEFAULT_SLOTS = 16
"""Slots on a CPU."""
RUNNERS = ("auto", "generate", "pooling")

_KINDS: Mapping[str, tuple[type | UnionType, str]] = {
    "model": (str | Path, "the name or the path of a model"),
    "merge_adapter": (str | Path | None, "the folder of an adapter"),
    "adapters": (Mapping | None, "a mapping from names to folders"),
    "plan": (Plan | str | Path | None, "a Plan, or the path of a plan or a bundle"),
    "dtype": (str, "float32, bfloat16 or auto"),
    "target": (str | None, "the name of a target"),
    "layout": (str | Path | None, "the name or the path of a layout"),
    "experts": (ExpertPlan | None, "an ExpertPlan"),
    "numbers": (Mapping | None, "a mapping such as {'weights': 'int8'}"),
    "seed": (int, "an integer"),
    "strict_config": (bool, "True or False"),
    "now": (str | None, "a local date and time such as 2026-01-31T12:00:00"),
    "structured_outputs": (list | tuple, "a list of forms"),
}


def check_kinds(**arguments: object) -> None:
    """Check that arguments of `LLM` have their types.

    Raises:
      ValueError: An argument has another type.
    """
    for name, value in arguments.items():
        kind, expected = _KINDS[name]
        # bool is an int in Python, but true is no seed
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{name}: expected {expected}, got {value!r}.")


@dataclass(frozen=True)
class PlanArguments:
    """The arguments, with the names and meanings that they have in `LLM`."""

    runner: str
    numbers: Mapping[str, Any] | None
    layout: str | Path | None
    experts: ExpertPlan | None
    max_model_len: int | None
    max_num_seqs: int | None
    structured_outputs: Sequence[Form]

    def __post_init__(self):
        check_choice("runner", self.runner, RUNNERS)
        for name in ("numbers", "layout", "experts", "structured_outputs"):
            check_kinds(**{name: getattr(self, name)})
        for name in ("max_model_len", "max_num_seqs"):
            if (size := getattr(self, name)) is not None:
                check_count(name, size)
        for index, form in enumerate(self.structured_outputs):
            if not isinstance(form, Form):
                place, expected = f"structured_outputs[{index}]", "StructuredOutputsParams"
                message = f"{place}: expected {expected} or AllowedTokens, got {form!r}."
                raise UserError(message)
        if "dtype" in (self.numbers or {}):
            raise UserError("numbers: expected no key dtype, got one. Give the argument dtype.")

    def check_beside(self, plan: Plan) -> None:
        """Check that the arguments agree with a given plan.

        Raises:
          ValueError: An argument sets what the plan has, or the plan is for another runner.
        """
        names = ("layout", "experts", "numbers", "max_model_len", "max_num_seqs")
        if given := [name for name in names if getattr(self, name) is not None]:
            raise UserError(
                f"{', '.join(given)}: expected none beside a plan, which has its own, got "
                f"{getattr(self, given[0])!r}. Change the plan, or make another with noria plan."
            )
        planned = "pooling" if plan.buckets.embed else "generate"
        if self.runner not in ("auto", planned):
            raise UserError(
                f"runner: expected {planned!r} or 'auto', as the plan says, got {self.runner!r}."
            )

    def plan(self, model: str, files: ModelFiles, target: Target, dtype: str) -> Plan:
        """Make the plan of a model on a target; `dtype` is not `auto`.

        Raises:
          ValueError: An argument is invalid, or does not fit the model or the target.
          ConfigError: The layout cannot be read.
        """
        config = files.spec.config
        planned_model = PlannedModel(model, files.fingerprint())
        numbers = Numbers.from_table({"dtype": dtype, **(self.numbers or {})})
        numbers = keep_published(numbers, files)
        embeds = self.runner == "pooling"
        if self.runner == "auto":
            embeds = config.lacks_generation is not None
        if embeds and (self.experts is not None or self.structured_outputs):
            raise UserError(
                "experts, structured_outputs: expected none for vectors of texts. "
                "Remove them, or open the model with runner='generate'."
            )
        spelling, num_devices = self.layout, len(target.devices)
        layout = None if spelling is None else read_layout(str(spelling), num_devices)
        plan_checks.check_layout(layout, files, target, weight_rules=numbers.weight_rules)
        experts, reason = self.experts or default_experts(config), ""
        max_length = self._max_length(config.max_position)
        if embeds:
            grid = embed_ladder(max_length, aims(target.name, layout))
        else:
            defaults = GridDefaults.for_layout(layout, target.platform, numbers.cache_codes)
            work, memory_bytes = work_of(config, numbers, layout, target), device_bytes(target)
            holds = room_on_accelerator(work, target, memory_bytes, defaults)
            slots = self.max_num_seqs or _slots(target, holds, max_length, defaults)
            grid = ladder_grid(max_length, slots, score=True, defaults=defaults)
            max_bytes = bytes_for_pages(work, target, memory_bytes, defaults.cpu_cache_share)
            if experts is None or not experts.has_capacity:
                # without room for one row, the built graphs are refused with the bytes they need
                grid = in_memory_of(grid, work, target, max_bytes) or grid
            if self.max_model_len is None and grid.max_length < config.max_position:
                reason = f"LLM plans for {grid.max_length} tokens if max_model_len is not given"
        return Plan(
            target.name, planned_model, numbers, grid, layout, experts, max_length_reason=reason
        )

    def structures(self, files: ModelFiles) -> Structures:
        """Compile the forms that requests may ask for.

        Raises:
          RowError: A form is wrong, not supported, or the model cannot write it.
        """
        structures = Structures()
        tokenizer = (
            load_tokenizer(files.tokenizer_files, files.path) if self.structured_outputs else None
        )
        structures.compile_allowed = partial(session.allowed_tokens, files, tokenizer)
        if tokenizer is not None:
            structures.make_trie = partial(session.vocabulary_trie, files, tokenizer)
        for form in self.structured_outputs:
            structures.automaton(form)
        return structures

    def with_tables(self, plan: Plan, structures: Structures, adapters: AdapterSet | None) -> Plan:
        """The plan with the tables of forms and adapters that it lacks."""
        grid = plan.buckets
        if grid.structured is None and not grid.embed:
            forms = {form.fingerprint for form in self.structured_outputs}
            grid = replace(grid, structured=structures.grid(forms))
        if grid.adapters is None and adapters is not None:
            grid = replace(grid, adapters=adapters.grid())
        return replace(plan, buckets=grid)

    def check_forms(self, plan: Plan) -> None:
        """Check that a plan has the forms of answers.

        Raises:
          ValueError: It lacks one.
        """
        structured = plan.buckets.structured
        for index, form in enumerate(self.structured_outputs):
            if structured is None or form.fingerprint not in structured.schemas:
                raise UserError(
                    f"structured_outputs[{index}]: expected a form that the plan's [structured] "
                    f"has, got {form.fingerprint}. Plan again for rows with this form by noria "
                    f"plan, or leave out the plan."
                )

    def _max_length(self, limit: int) -> int:
        if self.max_model_len is not None and self.max_model_len > limit:
            raise UserError(
                f"max_model_len: expected at most {limit}, the published context of this model, "
                f"got {self.max_model_len}."
            )
        return min(limit, self.max_model_len or DEFAULT_MAX_LENGTH)


def _slots(
    target: Target,
    holds: Callable[[int, int], bool] | None,
    max_length: int,
    defaults: GridDefaults,
) -> int:
    """The default number of slots: on an accelerator, as many as its memory holds."""
    if target.platform == "cpu":
        return DEFAULT_SLOTS
    if holds is None:
        return defaults.max_decode_slots
    return slots_that_fit(holds, defaults.max_decode_slots, max_length, defaults.slot_multiple)

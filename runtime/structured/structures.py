"""Compiles the forms that the rows of a job ask for, each once, and packs their tables.

The tokens that a row allows are compiled to an automaton as its form is.

Does not know about devices, files or endpoints. Guarantees: the same form has the same automaton in
every process and every run. Modules that take time to import are imported for the first form.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ..errors import ConfigError, RowError
from .params import AllowedTokens, StructuredOutputsParams

if TYPE_CHECKING:
    from ...compile.grids.structured_grid import StructuredGrid
    from .tables import JobTables, PackedStructures
    from .token_automaton import TokenAutomaton, TokenTrie

MAX_TABLE_BYTES = 512 << 20
"""Maximum size of the tables of all forms of a job."""
MakeTrie = Callable[[], "TokenTrie"]
CompileAllowed = Callable[[AllowedTokens], "TokenAutomaton"]
Form = StructuredOutputsParams | AllowedTokens


class Structures:
    """The automata of all forms that were asked for.

    Args:
      make_trie: Makes the vocabulary, when the first form is compiled; None for a model without a
        tokenizer, which cannot have forms.
      compile_allowed: Compiles the tokens that a request allows; None for a model that has none.
    """

    def __init__(
        self, make_trie: MakeTrie | None = None, compile_allowed: CompileAllowed | None = None
    ):
        self.make_trie, self.compile_allowed = make_trie, compile_allowed
        self._trie: TokenTrie | None = None
        self._known: dict[str, TokenAutomaton | RowError] = {}
        self._tables: JobTables | None = None

    def automaton(self, form: Form) -> "TokenAutomaton":
        """The automaton of a form.

        Raises:
          RowError: The form is wrong, not supported, too large, or the model cannot write it.
          ConfigError: The tables of all forms together are too large.
        """
        known = self._known.get(key := form.fingerprint)
        if known is None:
            try:
                known = self._compiled(form)
            except RowError as error:
                known = error
            self._known[key] = known
        if isinstance(known, RowError):
            raise known
        return known

    def shortest(self, fingerprint: str | None) -> int:
        """The number of tokens of the shortest answer of a form that was compiled; 0 for None."""
        return 0 if fingerprint is None else self._compiled_before(fingerprint).shortest

    def grid(self, fingerprints: Collection[str]) -> "StructuredGrid | None":
        """The sizes of the tables of some forms that were compiled; None for no form."""
        if not fingerprints:
            return None
        from .tables import JobTables

        schemas, tables = sorted(fingerprints), JobTables()
        for fingerprint in schemas:
            tables.add(self._compiled_before(fingerprint))
        return tables.grid(schemas)

    def pack(self, grid: "StructuredGrid", padded_vocab: int) -> "PackedStructures":
        """The tables of a plan; a schema of the plan that no row asks for stays empty."""
        from .tables import pack_tables

        known = {schema: self._known.get(schema) for schema in grid.schemas}
        automata = {s: a for s, a in known.items() if a and not isinstance(a, RowError)}
        return pack_tables(grid, automata, padded_vocab)

    def _compiled_before(self, fingerprint: str) -> "TokenAutomaton":
        automaton = self._known[fingerprint]
        assert not isinstance(automaton, RowError)
        return automaton

    def _compiled(self, form: Form) -> "TokenAutomaton":
        from .form_compiler import compile_form, refused
        from .tables import JobTables

        if isinstance(form, AllowedTokens):
            assert self.compile_allowed is not None
            automaton = self.compile_allowed(form)
        else:
            if self._trie is None:
                if self.make_trie is None:
                    raise refused("expected a model with a tokenizer, got one without")
                self._trie = self.make_trie()
            automaton = compile_form(form, self._trie)
        self._tables = self._tables or JobTables()
        self._tables.add(automaton)
        size = self._tables.num_bytes(len(automaton.class_of_token))
        if size > MAX_TABLE_BYTES:
            raise ConfigError(
                f"structured output: expected tables of at most {MAX_TABLE_BYTES / 1e6:.0f} MB, "
                f"got {size / 1e6:.0f} MB for {self._tables.forms - 1} forms. Split the job by "
                f"forms."
            )
        return automaton

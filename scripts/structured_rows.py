"""Check answers of many forms on a model with an independent validator, or measure their tables.

    python scripts/structured_rows.py --tables    # seconds and bytes of each form
    python scripts/structured_rows.py             # answers at temperatures 0 and 1

Needs the package `jsonschema` for the answers.
"""

import argparse
import json
import re
import time
from typing import Any

from noria.runtime import LLM, SamplingParams, StructuredOutputsParams
from noria.runtime.checkpoint import open_model
from noria.runtime.session import vocabulary_trie
from noria.runtime.structured.form_compiler import compile_form
from noria.runtime.text.load_tokenizer import load_tokenizer


def record(**properties: Any) -> dict[str, Any]:
    """A schema of an object whose keys are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
FORMS: dict[str, dict[str, Any]] = {
    "person": {"json": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150})},
    "optional keys": {
        "json": {"type": "object", "properties": {f"field{i}": TEXT for i in range(8)}}
    },
    "nested": {"json": record(user=record(id=WHOLE, address=record(city=TEXT, zip=TEXT)))},
    "tags": {"json": record(tags={"type": "array", "items": {"enum": ["a", "b", "c"]}})},
    "labels": {"json": {"enum": ["positive", "negative", "neutral", "mixed"]}},
    "tuple": {"json": {"type": "array", "prefixItems": [TEXT, WHOLE], "items": False}},
    "numbers": {
        "json": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4}
    },
    "unit interval": {"json": record(score={"type": "number", "minimum": 0, "maximum": 1})},
    "short string": {"json": {"type": "string", "minLength": 1, "maxLength": 20}},
    "string of 200": {"json": {"type": "string", "maxLength": 200}},
    "identifier": {"json": record(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"})},
    "date-time": {"json": record(at={"type": "string", "format": "date-time"})},
    "email": {"json": record(email={"type": "string", "format": "email"})},
    "uuid": {"json": record(id={"type": "string", "format": "uuid"})},
    "null or text": {"json": record(note={"type": ["string", "null"]})},
    "any of": {"json": {"anyOf": [record(error=TEXT), record(value=WHOLE)]}},
    "references": {
        "json": {
            "$defs": {"point": record(x=WHOLE, y=WHOLE)},
            **record(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
        }
    },
    "list of records": {
        "json": {"type": "array", "items": record(name=TEXT, done={"type": "boolean"})}
    },
    "map": {"json": {"type": "object", "additionalProperties": {"type": "integer"}}},
    "20 keys": {"json": record(**{f"key number {i}": [TEXT, WHOLE][i % 2] for i in range(20)})},
    "any object": {"json_object": True},
    "phone number": {"regex": r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}"},
    "choice": {"choice": ["yes", "no", "I do not know"]},
}
TEMPERATURES = (0.0, 1.0)


def main() -> None:
    options = _parse()
    forms = {name: StructuredOutputsParams(**form) for name, form in FORMS.items()}
    if options.tables:
        print(measure(forms, options.model))
        return
    failures = check(forms, options)
    print(f"{len(forms) * len(TEMPERATURES) * options.samples} answers, {failures} not valid")
    raise SystemExit(bool(failures))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--tables", action="store_true", help="measure the tables only")
    add("--samples", type=int, default=4, help="answers of each form and temperature")
    add("--extra-tokens", type=int, default=40, help="max_tokens above the shortest answer")
    return parser.parse_args()


def measure(forms: dict[str, StructuredOutputsParams], model: str) -> str:
    """The states, classes, masks, bytes and seconds of each form, as Markdown."""
    with open_model(model) as files:
        tokenizer = load_tokenizer(files.tokenizer_files)
        assert tokenizer is not None
        trie = vocabulary_trie(files, tokenizer)
    lines = ["| form | states | classes | masks | MB | seconds |", "|---|--:|--:|--:|--:|--:|"]
    for name, form in forms.items():
        start = time.perf_counter()
        tokens = compile_form(form, trie)
        seconds = time.perf_counter() - start
        states, classes, masks = (
            tokens.num_states,
            tokens.num_classes,
            len(tokens.mask_block_MJ),
        )
        num_bytes = sum(table.nbytes for table in vars(tokens).values())
        sizes = f"{states} | {classes} | {masks} | {num_bytes / 1e6:.2f}"
        lines.append(f"| {name} | {sizes} | {seconds:.2f} |")
    return "\n".join(lines)


def check(forms: dict[str, StructuredOutputsParams], options: argparse.Namespace) -> int:
    """Generate answers of every form, half of them with little room; count those not valid."""
    failures = 0
    with LLM(
        model=options.model,
        max_model_len=320,
        max_num_seqs=32,
        structured_outputs=list(forms.values()),
    ) as llm:
        generator = llm._require_open()
        assert generator.admission.structures is not None
        for temperature in TEMPERATURES:
            for name, form in forms.items():
                shortest = generator.admission.structures.automata[form.fingerprint].shortest
                params = [
                    SamplingParams(
                        temperature=temperature,
                        seed=seed,
                        max_tokens=shortest + seed % 2 * options.extra_tokens,
                        structured_outputs=form,
                    )
                    for seed in range(options.samples)
                ]
                question = [{"role": "user", "content": f"Give an example: {name}"}]
                for output in llm.chat([question] * len(params), params):
                    (answer,) = output.outputs
                    if answer.finish_reason != "stop" or not is_valid(FORMS[name], answer.text):
                        failures += 1
                        print("NOT VALID", end=" ")
                    print(f"{name} {temperature:g}: {answer.text[:100]!r}", flush=True)
    return failures


def is_valid(form: dict[str, Any], text: str) -> bool:
    """Whether an independent validator accepts an answer."""
    import jsonschema

    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    validator = jsonschema.Draft202012Validator(
        form.get("json", {"type": "object"}),
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )
    return validator.is_valid(json.loads(text))


if __name__ == "__main__":
    main()

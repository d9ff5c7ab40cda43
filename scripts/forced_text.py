"""Count the tokens in the answers of a finished job for which their form left no choice.

One prefill call could compute a run of forced tokens in place of decode steps. It can only begin
between two decode calls, and a single decode call computes a whole run that is shorter than
`steps_per_call`. Suppose that runs of at least some length are prefilled. For several such lengths,
this script counts the decode calls that remain for all rows, and the prefill calls. A token is
forced if the form of the answer allows exactly one next byte at each byte of the token. Answers are
tokenized anew, as the output has no ids.

    noria batch -i in.jsonl -o out.jsonl --model smollm2
    python scripts/forced_text.py -i in.jsonl -o out.jsonl > benchmarks/forced_text.md
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from noria.runtime.checkpoint import open_model
from noria.runtime.structured.byte_automaton import compile_language
from noria.runtime.structured.form_compiler import read_form
from noria.runtime.structured.language import DEAD, START, ByteAutomaton
from noria.runtime.structured.params import StructuredOutputsParams
from noria.runtime.text.load_tokenizer import load_tokenizer
from noria.runtime.text.tokenizer import Tokenizer

SHORTEST_RUNS = (2, 4, 6, 8, 12, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--input", type=Path, required=True, help="rows with json forms")
    parser.add_argument("-o", "--output", type=Path, required=True, help="their answers")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps-per-call", type=int, default=8)
    options = parser.parse_args()
    with open_model(options.model) as files:
        tokenizer = load_tokenizer(files.tokenizer_files)
    assert tokenizer is not None
    answers = [
        forced_tokens(form, text, tokenizer)
        for form, text in _answers(options.input, options.output)
    ]
    print(_report(answers, options.steps_per_call))


def _answers(requests: Path, outputs: Path) -> Iterator[tuple[str, str]]:
    """The form of each row that has one, as JSON, and its answer."""
    with requests.open("rb") as asked, outputs.open("rb") as answered:
        for request, output in zip(map(json.loads, asked), map(json.loads, answered), strict=True):
            form = request["body"].get("structured_outputs")
            if form and output["response"]:
                choices = output["response"]["body"]["choices"]
                yield from ((json.dumps(form), each["message"]["content"]) for each in choices)


def forced_tokens(form: str, text: str, tokenizer: Tokenizer) -> list[bool]:
    """Whether each token of an answer is forced; the end token, which comes last, is not."""
    automaton, has_one_next_S = _automaton(form)
    state, is_forced = START, []
    for byte in text.encode():
        is_forced.append(bool(has_one_next_S[state]))
        state = automaton.next_SC[state, automaton.class_of_byte[byte]]
    assert automaton.is_accepting_S[state], text
    (ids,) = tokenizer.encode_prompts([text])
    assert isinstance(ids, list)
    ends = np.cumsum([len(tokenizer.token_bytes(token)) for token in ids])
    assert ends[-1] == len(is_forced), "the tokens spell other bytes than the text"
    return [all(part) for part in np.split(np.array(is_forced), ends[:-1])] + [False]


@cache
def _automaton(form: str) -> tuple[ByteAutomaton, np.ndarray]:
    """The automaton of a form, and whether each state goes on with one byte and cannot end."""
    automaton = compile_language(read_form(StructuredOutputsParams(**json.loads(form))).language)
    bytes_of_class_C = np.bincount(automaton.class_of_byte, minlength=automaton.next_SC.shape[1])
    num_next_S = ((automaton.next_SC != DEAD) * bytes_of_class_C).sum(1)
    return automaton, (num_next_S == 1) & ~automaton.is_accepting_S


def count_calls(is_forced: list[bool], steps: int, shortest: int) -> tuple[int, int]:
    """Count the decode and prefill calls of a row if runs of at least `shortest` are prefilled."""
    decode_calls = prefill_calls = place = 0
    while place < len(is_forced):
        run = _run_length(is_forced, place)
        if run >= shortest:
            prefill_calls, place = prefill_calls + 1, place + run
        else:
            decode_calls, place = decode_calls + 1, place + steps
    return decode_calls, prefill_calls


def _run_length(is_forced: list[bool], place: int) -> int:
    return next(i for i in range(len(is_forced)) if not is_forced[place + i])


def _report(answers: list[list[bool]], steps: int) -> str:
    tokens, forced = sum(map(len, answers)), sum(map(sum, answers))
    runs = Counter(
        _run_length(answer, place)
        for answer in answers
        for place, is_forced in enumerate(answer)
        if is_forced and (place == 0 or not answer[place - 1])
    )
    lines = [
        "# Text that forms leave no choice about",
        "",
        f"Made by `scripts/forced_text.py` from {len(answers)} answers with {tokens:,} tokens. "
        f"{forced / tokens:.0%} of the tokens are forced; the longest run has "
        f"{max(runs, default=0)} tokens. A decode call makes {steps} tokens.",
        "",
        "| shortest run that is prefilled | decode calls of all rows | prefill calls of all rows |",
        "|---|--:|--:|",
    ]
    whole = sum(-(-len(answer) // steps) for answer in answers)
    lines.append(f"| none | {whole:,} | 0 |")
    for shortest in SHORTEST_RUNS:
        counts = [count_calls(answer, steps, shortest) for answer in answers]
        decode_calls, prefill_calls = map(sum, zip(*counts, strict=True))
        lines.append(f"| {shortest} tokens | {decode_calls:,} | {prefill_calls:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

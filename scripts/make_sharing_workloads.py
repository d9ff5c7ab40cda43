"""Write workloads whose prompts begin alike, as OpenAI Batch lines: four kinds that users have.

`one_prompt` has one system prompt and 2,000 questions. `few_shot` has eight headers with examples,
and 200 items for each. `documents` has 20 questions about each of 100 documents. `conversations`
has 150 conversations, with one row for every turn, and each row holds the history before it.

All text is made of the words and sentences below. The same seed gives the same bytes, on any
Python. Does not know about models or tokenizers: lengths are drawn in words. A sample of N rows
keeps the proportions of the whole, because the lengths and the numbers of turns of even the first
groups spread evenly over their range.

    python scripts/make_sharing_workloads.py build/sharing
    python scripts/make_sharing_workloads.py build/sharing --workloads documents --rows 200
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

SEED = 30
ORDERS = "grouped", "shuffled"
GOLDEN_RATIO = 0.6180339887498949

PLACES = (
    "the old mill",
    "the harbour office",
    "the village school",
    "the north station",
    "the glass works",
    "the city archive",
    "the fish market",
    "the upper reservoir",
    "the botanical garden",
    "the paper factory",
    "the coastal railway",
    "the county hospital",
    "the observatory",
    "the timber yard",
    "the ferry company",
    "the town library",
)
PEOPLE = (
    "the engineer",
    "a young teacher",
    "the head of the council",
    "the archivist",
    "a retired captain",
    "the new director",
    "a group of students",
    "the night porter",
    "the owner's daughter",
    "an inspector from the capital",
    "the gardener",
    "a merchant from the south",
)
WORDS = {
    "place": PLACES,
    "other": PLACES,
    "person": PEOPLE,
    "someone": PEOPLE,
    "did": (
        "repaired",
        "measured",
        "described",
        "painted",
        "closed",
        "reopened",
        "visited",
        "extended",
        "inspected",
        "photographed",
        "sold",
        "insured",
    ),
    "thing": (
        "a steel bridge",
        "the second warehouse",
        "a map of the valley",
        "two cranes",
        "the water meter",
        "a collection of letters",
        "the main boiler",
        "three wooden boats",
        "the west wall",
        "a printing press",
        "the storage shed",
        "a weather station",
        "the ticket hall",
        "the account books",
    ),
    "item": (
        "a garden chair",
        "a pair of boots",
        "the blue kettle",
        "a reading lamp",
        "a bicycle pump",
        "the travel bag",
        "a set of glasses",
        "the winter coat",
        "a kitchen scale",
        "the folding table",
        "a rain jacket",
        "the radio",
    ),
    "reason": (
        "because the costs were higher than expected",
        "although nobody had asked for it",
        "after the storms of last winter",
        "since the old rules had ended",
        "while the main road was closed",
        "so that the work could begin in spring",
        "as the reports had promised",
        "before the first snow fell",
        "which surprised the whole town",
        "and the newspapers wrote about it for weeks",
    ),
    "quality": ("late", "broken", "too small", "better than expected", "incomplete", "well packed"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "month": ("January", "March", "April", "June", "July", "September", "October", "November"),
    "year": tuple(map(str, range(1874, 2012, 3))),
    "number": tuple(map(str, range(12, 980, 11))),
    "amount": tuple(map(str, range(15, 600, 15))),
    "step": (
        "ask for the order number",
        "offer a new delivery",
        "refer to the list of prices",
        "name the next free date",
        "write a short note for the team",
        "apologise once and without excuses",
        "repeat the address in full",
        "explain who will call back",
        "give the opening hours",
        "mention the guarantee",
    ),
    "case": (
        "a customer has lost the receipt",
        "a parcel arrives damaged",
        "somebody asks for a discount",
        "an order is older than two weeks",
        "the article is out of stock",
        "a message contains several questions",
        "the address is abroad",
        "a guest wants to change a booking",
        "the payment was made twice",
        "somebody writes in anger",
    ),
}
SENTENCES = {
    "fact": (
        "In {year}, {person} {did} {thing} near {place}, {reason}.",
        "{place} holds {number} records about {other}, {reason}.",
        "Every {day} in {month}, {person} {did} {thing} for {amount} crowns.",
        "{person} says that {place} needs {thing}, {reason}.",
        "The report of {year} names {person}, {someone} and {number} others who {did} {thing}.",
        "{place} stands {number} steps from {other}, and {person} {did} both in {month} {year}.",
        "For {amount} crowns, {someone} {did} {thing}, {reason}.",
        "About {number} visitors came to {place} in {month}, {reason}.",
    ),
    "rule": (
        "When {case}, {step} and then {step}.",
        "Never {step} if {case}.",
        "If {case} on a {day}, first {step}, and only then {step}.",
        "For orders above {amount} crowns, {step}, even when {case}.",
        "Articles such as {item} or {item} can be returned within {number} days.",
        "As soon as {case}, {step}; {person} will do the rest.",
    ),
    "question": (
        "I bought {item} for {amount} crowns on {day}, and it was {quality}.",
        "My order {number} was {quality} when it came to {place}.",
        "Can I return {item} and {item} together, {reason}?",
        "How long does it take to send {item} to {place} in {month}?",
        "{person} told me to write to you about {item}, {reason}.",
        "Would you repair {item} from {year} for less than {amount} crowns?",
        "What should I do when {item} is {quality}?",
        "On {day} I asked for {item}, and I have heard nothing since {month}.",
    ),
    "message": (
        "{item} for {amount} crowns came on {day} and was {quality}.",
        "{person} {did} {thing} in {month}, {reason}.",
        "Please send {item} to {place} before {day}.",
        "Order {number} was {quality}, {reason}.",
        "{place} and {other} were {quality} in {month}.",
        "Who {did} {thing} near {place} in {year}?",
    ),
    "query": (
        "Who {did} {thing} near {place}, and in which year?",
        "How many visitors or records does the text name for {place}?",
        "Does the text say that {person} {did} {thing}?",
        "Which reason does the text give for {thing} at {place}?",
        "List everything that {person} did, in the order of the years.",
        "Summarise in two sentences how {place} and {other} differ.",
        "Is {year} named in the text, and who is named with it?",
        "Which payments of about {amount} crowns occur, and who made them?",
    ),
    "reply": (
        "{person} {did} {thing} in {year}, {reason}.",
        "You could start at {place} on a {day}, as {other} is closed in {month}.",
        "It costs about {amount} crowns, {reason}.",
        "I would ask {someone} about {thing}.",
    ),
}
TASKS = (
    ("Say whether the message is a question, a complaint, an order or a report.", "Kind"),
    ("Name the place in the message, or answer that there is none.", "Place"),
    ("Say how urgent the message is, from one to five, and give a reason.", "Urgency"),
    ("Choose the team that should read the message.", "Team"),
    ("Shorten the message to a title.", "Title"),
    ("Say whether the writer is pleased, neutral or angry.", "Mood"),
    ("Name all numbers in the message and what they count.", "Numbers"),
    ("Answer the message in a few polite words.", "Answer"),
)


class Row(NamedTuple):
    """One request: the text of a completion or the messages of a chat, and its answer's length."""

    prompt: str | list[dict[str, str]]
    max_tokens: int


Group = list[Row]
"""Rows that begin alike."""


class Writer:
    """Writes sentences with words that a seed chooses."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`."""
        # only random() is guaranteed to give the same numbers in every Python version
        return low + int(self._rng.random() * (high - low + 1))

    def pick(self, options: tuple[str, ...]) -> str:
        return options[self.number(0, len(options) - 1)]

    def sentence(self, kind: str) -> str:
        template = self.pick(SENTENCES[kind])
        text = re.sub(r"\{(\w+)\}", lambda slot: self.pick(WORDS[slot[1]]), template)
        return text[0].upper() + text[1:]

    def text(self, kind: str, num_words: int) -> str:
        """Return sentences that together have at least `num_words` words."""
        sentences: list[str] = []
        while len(" ".join(sentences).split()) < num_words:
            sentences.append(self.sentence(kind))
        return " ".join(sentences)

    def shuffled(self, rows: list[Any]) -> list[Any]:
        return sorted(rows, key=lambda _: self._rng.random())


@dataclass(frozen=True)
class Workload:
    """A kind of job: its groups of rows, and how files and samples of it are made."""

    groups: Callable[[Writer], list[Group]]
    order: str
    """The usual order of the rows in a file, one of ORDERS."""
    keeps_groups: bool
    """Whether a sample has fewer groups, not fewer rows of each group."""


def one_prompt(writer: Writer) -> list[Group]:
    rules = f"You answer the customers of a shop. {writer.text('rule', 800)}"
    return [[_chat(rules, writer, "question", (18, 44), (32, 64)) for _ in range(2000)]]


def few_shot(writer: Writer) -> list[Group]:
    groups = []
    for index, (task, label) in enumerate(TASKS):
        header = f"{task}\n\n"
        num_words = _spread(index, 275, 660)
        while len(header.split()) < num_words:
            answer = writer.sentence("reply")
            header += f"Message: {writer.text('message', 12)}\n{label}: {answer}\n\n"
        groups.append(
            [
                Row(
                    f"{header}Message: {writer.text('message', writer.number(8, 40))}\n{label}:",
                    writer.number(8, 16),
                )
                for _ in range(200)
            ]
        )
    return groups


def documents(writer: Writer) -> list[Group]:
    groups = []
    for index in range(100):
        text = f"Read this text.\n\n{writer.text('fact', _spread(index, 420, 850))}\n\nQuestion: "
        groups.append(
            [
                Row([_message("user", text + writer.text("query", writer.number(6, 20)))], 32)
                for _ in range(20)
            ]
        )
    return groups


def conversations(writer: Writer) -> list[Group]:
    groups = []
    for index in range(150):
        history: list[dict[str, str]] = []
        rows = []
        for _ in range(_spread(index, 2, 8)):
            history.append(_message("user", writer.text("question", writer.number(8, 46))))
            rows.append(Row(list(history), writer.number(32, 48)))
            history.append(_message("assistant", writer.text("reply", writer.number(20, 30))))
        groups.append(rows)
    return groups


WORKLOADS = {
    "one_prompt": Workload(one_prompt, "grouped", keeps_groups=False),
    "few_shot": Workload(few_shot, "shuffled", keeps_groups=False),
    "documents": Workload(documents, "grouped", keeps_groups=True),
    "conversations": Workload(conversations, "grouped", keeps_groups=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rows", type=int, help="write a sample of this many rows")
    parser.add_argument("--order", choices=ORDERS, help="order of rows (default: the workload's)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.workloads:
        path = options.folder / f"{name}{options.rows or ''}.jsonl"
        lines = batch_lines(name, options.rows, options.order)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(path)


def batch_lines(name: str, num_rows: int | None = None, order: str | None = None) -> Iterator[str]:
    """Yield the lines of a workload.

    Args:
        name: A name in WORKLOADS.
        num_rows: The size of a sample that keeps the proportions; all rows by default.
        order: One of ORDERS; the workload's usual order by default.
    """
    workload = WORKLOADS[name]
    writer = Writer(SEED + list(WORKLOADS).index(name))
    named = [
        [(f"{name}-{number:03d}-{index:04d}", row) for index, row in enumerate(group)]
        for number, group in enumerate(workload.groups(writer))
    ]
    # groups one after the other, or a row of every group in turn
    rows = list(chain(*named) if workload.keeps_groups else chain(*zip(*named, strict=True)))
    rows = rows[:num_rows]
    if (order or workload.order) == "shuffled":
        rows = writer.shuffled(rows)
    else:
        rows = sorted(rows, key=lambda entry: entry[0])
    for custom_id, row in rows:
        yield json.dumps(_line(custom_id, row))


def _line(custom_id: str, row: Row) -> dict[str, Any]:
    is_text = isinstance(row.prompt, str)
    body = {
        "model": "smollm2",
        "prompt" if is_text else "messages": row.prompt,
        "temperature": 0,
        "max_tokens": row.max_tokens,
        "ignore_eos": True,
    }
    url = "/v1/completions" if is_text else "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def _chat(
    system: str, writer: Writer, kind: str, words: tuple[int, int], tokens: tuple[int, int]
) -> Row:
    question = writer.text(kind, writer.number(*words))
    return Row([_message("system", system), _message("user", question)], writer.number(*tokens))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _spread(index: int, low: int, high: int) -> int:
    """Return a number from `low` to `high`; those of the first indices already spread evenly."""
    return low + int((index * GOLDEN_RATIO) % 1 * (high - low + 1))


if __name__ == "__main__":
    main()

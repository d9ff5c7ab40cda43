"""Write the prompts of the benchmark: chat requests of 50 to 400 tokens, as OpenAI Batch lines.

Does not know about models or tokenizers: lengths are drawn in words, and the benchmark checks the
lengths in tokens. The same seed gives the same bytes, on any Python.

    python scripts/peers/workload.py > benchmarks/workloads/peers64.jsonl
"""

import json
import random
import sys
from collections.abc import Iterator

NUM_PROMPTS = 64
MAX_TOKENS = 64
SEED = 20
SHORTEST_WORDS, LONGEST_WORDS = 18, 310

OPENINGS = (
    "Here are my notes from this week.",
    "I am writing a short report and need help.",
    "Please read the following text with care.",
    "This is part of a letter from a friend.",
)
SUBJECTS = (
    "the old mill by the river",
    "a small team of engineers",
    "the village school",
    "my neighbour's garden",
    "the night train to the coast",
    "a market stall in the square",
    "the harbour office",
    "our local library",
)
VERBS = (
    "has changed more in a year than in the ten before it",
    "was built with stone from the quarry on the hill",
    "depends on the water that comes down in spring",
    "keeps a careful record of everything that arrives",
    "opens at eight and closes when the last visitor leaves",
    "needs new tools, more hands and a better plan",
    "sells apples, bread, cheese and honey on Saturdays",
    "was repaired twice after the storms of last winter",
)
ENDINGS = (
    "and nobody remembers who decided it.",
    "which surprised everyone who came to see it.",
    "because the work has to be finished before the rain.",
    "so the council will talk about it again in May.",
    "although the costs were higher than expected.",
    "and that is why people still speak of it.",
)
QUESTIONS = (
    "What should I do next?",
    "Summarise this in two sentences.",
    "Write a short poem about it.",
    "Which part matters most, and why?",
    "Explain this to a ten year old child.",
    "List three questions that a reader may ask.",
)


def batch_lines() -> Iterator[str]:
    """Yield the lines, with prompt lengths spread evenly over the range and then shuffled."""
    rng = random.Random(SEED)
    step = (LONGEST_WORDS - SHORTEST_WORDS) / (NUM_PROMPTS - 1)
    word_counts = [round(SHORTEST_WORDS + step * index) for index in range(NUM_PROMPTS)]
    word_counts.sort(key=lambda _: rng.random())
    for index, num_words in enumerate(word_counts):
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": _prompt(rng, num_words)}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }
        line = {
            "custom_id": f"prompt-{index:02d}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }
        yield json.dumps(line)


def _prompt(rng: random.Random, num_words: int) -> str:
    sentences = [_pick(rng, OPENINGS)]
    question = _pick(rng, QUESTIONS)
    while len(" ".join([*sentences, question]).split()) < num_words:
        subject = _pick(rng, SUBJECTS)
        sentence = f"{subject} {_pick(rng, VERBS)}, {_pick(rng, ENDINGS)}"
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join([*sentences, question])


def _pick(rng: random.Random, options: tuple[str, ...]) -> str:
    # only random() is guaranteed to give the same numbers in every Python version
    return options[int(rng.random() * len(options))]


if __name__ == "__main__":
    sys.stdout.writelines(line + "\n" for line in batch_lines())

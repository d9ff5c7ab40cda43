"""Turns outputs and errors into output lines of the OpenAI Batch format.

Some readers are strict, so a line has only the standard's keys, with three exceptions. If expert
choices were dropped, their number is in `noria` beside `usage`. If a row has a rule for its
samples, each choice has a table `noria`. If a row asks for `prompt_logprobs`, they are under this
key, as vLLM's servers write them. Ids are hashes of custom_id, request and configuration, so the
same row of the same job has the same ids in every run. `created` is the wall time.

Does not know about files, order or the journal. Guarantees: every dict that it returns has only
finite numbers (a log-probability of minus infinity becomes -9999.0).
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..embedding.texts import cuts_of, lengths_of
from ..errors import RowError
from ..request import CompletionOutput, RequestOutput, TokenLogprob
from ..text.tokenizer import Tokenizer
from .figures import DROPPED
from .lines import BadRow, BatchRow
from .scan import ScannedRow

if TYPE_CHECKING:
    from ...modelzoo.pooling_config import Pooling

LOWEST_LOGPROB = -9999.0

# errors of lines that were not read as requests: the standard's form with `response: null`
_NEVER_EXECUTED = frozenset(
    {
        "invalid_json",
        "invalid_utf8",
        "invalid_line",
        "missing_custom_id",
        "duplicate_custom_id",
        "batch_cancelled",
    }
)
_OUR_FAULT = frozenset({"internal_error", "nonfinite_logits", "expert_overflow"})


class OutputLines:
    """Makes the output lines of one job.

    Args:
        model_name: The model in output lines, if a request names none.
        fingerprint: The fingerprint of the job's configuration, part of all ids.
        tokens: Names token ids; None without a tokenizer.
        pooling: The pooling of the model, for rows whose texts become vectors.
    """

    def __init__(
        self,
        *,
        model_name: str,
        fingerprint: str,
        tokens: Tokenizer | None = None,
        pooling: Callable[[], "Pooling | None"] = lambda: None,
    ):
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._tokens = tokens
        self._pooling = pooling

    def result(self, row: BatchRow, output: RequestOutput) -> dict[str, Any]:
        """The line of a request that ran: its result, or its error."""
        if output.error is not None:
            return self.error(row, output.error)
        if row.pooled is not None:
            return self._line(row, self._response(row, 200, self._pooled(row, output)), None)
        is_chat = row.kind == "chat"
        make_choice = self._chat_choice if is_chat else self._text_choice
        # scoring may return no continuation, but the answer has one choice
        completions = output.outputs or [CompletionOutput(0, "", [], None)]
        num_prompt = len(output.prompt_token_ids)
        num_completion = _num_output_tokens(output)
        body = {
            "id": self._id("chatcmpl-" if is_chat else "cmpl-", row),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": row.model or self._model_name,
            "choices": [make_choice(row, output, completion) for completion in completions],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
        }
        if output.samples is not None:
            for index, (choice, completion) in enumerate(
                zip(body["choices"], completions, strict=True)
            ):
                choice["index"] = index
                choice["noria"] = {
                    "sample": completion.index,
                    "samples": output.samples.total,
                    "answer": completion.answer,
                    "votes": completion.votes,
                    "stopped_early": completion.stopped_early,
                }
        if output.dropped_expert_choices:
            body["noria"] = {DROPPED: output.dropped_expert_choices}
        if is_chat and row.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(row, output)
        return self._line(row, self._response(row, 200, body), None)

    def _pooled(self, row: BatchRow, output: RequestOutput) -> dict[str, Any]:
        """The body of an answer about texts that became vectors."""
        # only such rows wait for numpy
        from .pooled_results import PREFIXES, pooled_body

        pooling = self._pooling()
        assert row.pooled is not None and pooling is not None
        return pooled_body(
            row.pooled,
            output,
            pooling,
            answer_id=self._id(PREFIXES[row.pooled.task], row),
            created=int(time.time()),
            model=row.model or self._model_name,
        )

    def error(self, row: BatchRow | BadRow, error: RowError) -> dict[str, Any]:
        """The line of a row that ends as an error."""
        if error.code in _NEVER_EXECUTED:
            return self._line(row, None, {"code": error.code, "message": error.message})
        status, kind = 400, "invalid_request_error"
        if error.code in _OUR_FAULT:
            status, kind = 500, "server_error"
        description = {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
        return self._line(row, self._response(row, status, {"error": description}), None)

    def id_of(self, row: ScannedRow) -> str:
        """The id of the output line of a row that runs."""
        return self._id("batch_req_", row)

    def _line(
        self, row: BatchRow | BadRow, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": self._id("batch_req_", row),
            "custom_id": row.custom_id,
            "response": response,
            "error": error,
        }

    def _response(
        self, row: BatchRow | BadRow, status: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        return {"status_code": status, "request_id": self._id("", row), "body": body}

    def _id(self, prefix: str, row: BatchRow | BadRow | ScannedRow) -> str:
        # lines without a usable custom_id may be equal, so their index is part of the id
        index = str(row.row) if isinstance(row, BadRow) else ""
        parts = (prefix, row.custom_id or "", row.request_hash, index, self._fingerprint)
        digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass"))
        return prefix + digest.hexdigest()[:32]

    def _chat_choice(
        self, row: BatchRow, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        logprobs = None
        if row.logprobs is not None:
            content = [
                {
                    **self._named(e.token_id, e.logprob),
                    "top_logprobs": [self._named(*other) for other in e.top[: row.logprobs]],
                }
                for e in completion.logprobs or []
            ]
            logprobs = {"content": content}
        message, finish_reason = self._message(row, completion)
        return {
            "index": completion.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _message(self, row: BatchRow, completion: CompletionOutput) -> tuple[dict[str, Any], str]:
        """The message of a chat answer, with its tool calls, and the reason for its end."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        finish_reason = completion.finish_reason or "length"
        if row.tools is None or completion.stopped_early is not None or finish_reason != "stop":
            return message, finish_reason
        message["content"], calls = row.tools.read(completion.text)
        if not calls:
            return message, finish_reason
        message["tool_calls"] = [
            {
                "id": self._id(f"call_{completion.index}_{number}_", row),
                "type": "function",
                "function": call._asdict(),
            }
            for number, call in enumerate(calls)
        ]
        # as in OpenAI's interface, the reason stays `stop` if the request names the tool
        return message, finish_reason if row.tools.choice == "named" else "tool_calls"

    def _text_choice(
        self, row: BatchRow, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        text = completion.text
        entries: list[TokenLogprob | None] = list(completion.logprobs or [])
        if row.echo:
            text = self._prompt_text(row, output) + text
            entries = list(output.prompt_logprobs or []) + entries
        logprobs = None
        if row.logprobs is not None:
            # nothing predicts the first prompt token, so it has an id and no entry
            token_ids = [entry.token_id for entry in entries if entry is not None]
            if len(token_ids) < len(entries):
                token_ids = [*output.prompt_token_ids[:1], *token_ids]
            logprobs = self._text_logprobs(token_ids, entries, row.logprobs)
        choice: dict[str, Any] = {
            "index": completion.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason or "length",
        }
        if row.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(row, output)
        return choice

    def _prompt_text(self, row: BatchRow, output: RequestOutput) -> str:
        written = row.prompt if output.prompt is None else output.prompt
        if written is not None and row.max_prompt_tokens is None:
            return written
        if self._tokens is None:
            return ""
        pieces = (self._tokens.token_bytes(token) for token in output.prompt_token_ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def _text_logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], count: int
    ) -> dict[str, Any]:
        """The four parallel lists of /v1/completions."""
        texts = [self._text(token) for token in token_ids]
        offsets = [0]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [entry and _finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._alternatives(entry, count) for entry in entries],
            "text_offset": offsets[: len(texts)],
        }

    def _alternatives(self, entry: TokenLogprob, count: int) -> dict[str, float]:
        """Log-probabilities by text; the chosen token is always included, as in the standard."""
        result: dict[str, float] = {}
        for token, logprob in (*entry.top[:count], (entry.token_id, entry.logprob)):
            # two tokens may have the same text; the likelier token comes first
            result.setdefault(self._text(token), _finite(logprob))
        return result

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = None if self._tokens is None else list(self._tokens.token_bytes(token))
        return {"token": self._text(token), "logprob": _finite(logprob), "bytes": raw}

    def _prompt_logprobs(self, row: BatchRow, output: RequestOutput) -> list[dict[str, Any] | None]:
        """One object for each prompt token, with facts by token id, as vLLM's servers write it."""
        count = row.prompt_logprobs or 0
        result: list[dict[str, Any] | None] = []
        for entry in output.prompt_logprobs or []:
            if entry is None:
                result.append(None)
                continue
            ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
            shown = dict(entry.top[:count]) | {entry.token_id: entry.logprob}
            result.append(
                {
                    str(token): {
                        "logprob": _finite(logprob),
                        "rank": ranks.get(token),
                        "decoded_token": self._text(token),
                    }
                    for token, logprob in shown.items()
                }
            )
        return result

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokens is None else self._tokens.token_text(token)


def error_of_line(line: bytes) -> RowError | None:
    """The error in an output line; None for a result."""
    return error_in(json.loads(line))


def error_in(record: Mapping[str, Any]) -> RowError | None:
    """The error in the record of an output line; None for a result."""
    error, response = record["error"], record["response"]
    if error is None and response["status_code"] != 200:
        error = response["body"]["error"]
    return None if error is None else RowError(error["code"], error["message"], error.get("param"))


def error_text(row: BatchRow | BadRow | ScannedRow, error: RowError) -> str:
    """The error of a row in one line, with the row's id and place."""
    name = row.place if row.custom_id is None else f"row {row.custom_id!r} ({row.place})"
    return f"{name}: {error.code}: {error.message.removeprefix(f'{row.place}: ')}"


def row_metrics(row: BatchRow, output: RequestOutput) -> dict[str, float]:
    """The figures of a row that the manifest sums over rows; empty for an error row."""
    if output.error is not None:
        return {}
    lengths = [len(completion.token_ids) for completion in output.outputs]
    samples = output.samples
    values: dict[str, float] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": _num_output_tokens(output),
    }
    if row.pooled is not None:
        values["prompt_tokens"] = sum(lengths_of(output.prompt_token_ids))
        if any(cuts := cuts_of(output.prompt_token_ids)):
            values["prompt_tokens_cut"], values["texts_cut"] = sum(cuts), sum(map(bool, cuts))
    if samples is not None and samples.stopped:
        values["stopped_samples"] = samples.stopped
        values["tokens_left"] = samples.tokens_left
    if output.dropped_expert_choices:
        values[DROPPED] = output.dropped_expert_choices
    reasons = [completion.finish_reason for completion in output.outputs]
    if row.params.max_tokens is None and "length" in reasons:
        values["at_max_length"] = reasons.count("length")
    times = output.metrics
    if times is not None:
        values["latency"] = times.finished - times.arrival
    if times is not None and times.first_token is not None:
        values["time_to_first_token"] = times.first_token - times.arrival
        longest = max(lengths, default=0)
        seconds = times.finished - times.first_token
        if longest > 1:
            values["inter_token_latency"] = seconds / (longest - 1)
        # tokens of one call come at one time
        if longest > 1 and seconds > 0:
            values["output_tokens_per_second"] = (longest - 1) / seconds
    return values


def _num_output_tokens(output: RequestOutput) -> int:
    """The tokens of all continuations, also of samples that a rule did not keep."""
    if output.samples is not None:
        return output.samples.output_tokens
    return sum(len(completion.token_ids) for completion in output.outputs)


def _finite(logprob: float) -> float:
    if math.isnan(logprob):
        raise RowError("nonfinite_logits", "expected finite log-probabilities, got NaN.")
    return max(float(logprob), LOWEST_LOGPROB)

"""Render a template in a child process: the chat template of a model, or that of a stage of a job.

A chat template is a program that comes with a model. The sandbox of jinja2 prevents access to
Python, but does not limit time and memory. So the template runs in this process, with limits of
processor time, memory and output, and without permission to write files. The parent process
(`template_process`) kills it if it takes too long.

This file is started as a script and not as a module of the package, so that only the standard
library and jinja2 are imported. The processes exchange frames over stdin and stdout: 4 bytes with
the length, then JSON. The first frame is `{"template", "memory_bytes", ...}`; its reply is
`{"variables"}`. Each following request is `{"num_contexts", "is_measured"}` and this number of
contexts; the reply to each context is `{"text", "reads_clock"}`, as soon as it is rendered. A reply
to a failure has `"error"` instead of the text; with `"fatal": true`, the process ends.
"""

import datetime
import json
import math
import resource
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any

MAX_FRAME_BYTES = 1 << 28
_MAX_ERROR_CHARACTERS = 500


def encode_frame(value: object) -> bytes:
    """Encode a value as a frame."""
    data = json.dumps(value).encode("ascii")
    return struct.pack(">I", len(data)) + data


def read_frame(read: Callable[[int], bytes]) -> Any:
    """Read one frame; raises EOFError if the stream ends or the frame is invalid."""
    return json.loads(_content_of_frame(read))


def _content_of_frame(read: Callable[[int], bytes]) -> bytes:
    header = read(4)
    length = struct.unpack(">I", header)[0] if len(header) == 4 else 0
    if not 0 < length <= MAX_FRAME_BYTES:
        raise EOFError
    data = read(length)
    if len(data) < length:
        raise EOFError
    return data


def main() -> None:
    """Render contexts until stdin ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    try:
        setup = read_frame(requests.read)
        now = setup["now"]
        clock = _Clock(now and datetime.datetime.fromisoformat(now))
        reader = _JsonReader()
        environment = _strict_environment(reader) if setup["is_strict"] else _environment(clock)
        _limit_memory(setup["memory_bytes"])
        _limit_processor_time(setup["cpu_seconds"])
        template, variables = _compile(environment, setup["template"])
    except EOFError:
        return
    except Exception as error:
        _send(replies, {"error": _describe(error), "fatal": True})
        return
    _send(replies, {"variables": sorted(variables)})
    while True:
        try:
            request = read_frame(requests.read)
            reader.has_placeholders = request["is_measured"]
            count = request["num_contexts"]
            # read all contexts first: the parent reads no reply before it has written all of them
            waiting = deque(_content_of_frame(requests.read) for _ in range(count))
            while waiting:
                _send(replies, _reply(template, waiting.popleft(), setup, clock))
        except EOFError:
            return
        except MemoryError:
            _send(replies, {"error": "it needs more memory than allowed", "fatal": True})
            return


class _Clock:
    """The time that templates see, which is the same for all renderings."""

    def __init__(self, now: datetime.datetime | None):
        self._now = now
        self.was_read = False

    def strftime(self, form: str) -> str:
        assert self._now is not None
        self.was_read = True
        return self._now.strftime(form)


class _JsonReader:
    """The filter `from_json`, which gives the value of a text in JSON."""

    def __init__(self):
        self.has_placeholders = False
        """Whether texts stand for answers that are not known yet."""

    def read(self, text: object) -> Any:
        try:
            return json.loads(text, parse_constant=_refuse_constant)  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError, RecursionError):
            if self.has_placeholders:
                return _Placeholder(text)
            import jinja2

            shown = json.dumps(text, default=repr, ensure_ascii=False)[:80]
            raise jinja2.TemplateError(f"from_json: expected a text in JSON, got {shown}") from None


class _Placeholder(str):
    """A text in place of a value that is not known yet, and of all parts and results of it."""

    def __iter__(self):
        yield self

    def __add__(self, other):
        return str(self) + other if isinstance(other, str) else self

    def __radd__(self, other):
        return other + str(self) if isinstance(other, str) else self


_SAME = ("mul", "rmul", "sub", "rsub", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod")
_SAME += ("pow", "rpow", "round", "abs", "neg")
for _name in _SAME:
    setattr(_Placeholder, f"__{_name}__", lambda self, *others: self)
for _name in ("lt", "le", "gt", "ge"):
    setattr(_Placeholder, f"__{_name}__", lambda self, other: False)


def _refuse_constant(literal: str) -> None:
    raise ValueError(f"expected JSON, got {literal}")


def _send(stream: IO[bytes], value: object) -> None:
    stream.write(encode_frame(value))
    stream.flush()


def _reply(template, context: bytes, setup: dict, clock: _Clock) -> dict[str, object]:
    _limit_processor_time(setup["cpu_seconds"])
    clock.was_read = False
    try:
        outcome = {"text": _render(template, json.loads(context), setup["max_characters"])}
    except MemoryError:
        raise
    except Exception as error:
        outcome = {"error": _describe(error)}
    return {**outcome, "reads_clock": clock.was_read}


def _environment(clock: _Clock):
    """The jinja2 environment of chat templates, with the same rules as in transformers."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, which marks text for training: only its body is used."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["strftime_now"] = clock.strftime
    return _with_functions(environment)


def _strict_environment(reader: _JsonReader):
    """The environment of templates of a stage: data comes before methods, and nothing is random.

    A value that is undefined, null, true, false, a list or an object fails, as its text would be in
    the notation of Python. The filter `from_json` reads the value of a text.
    """
    import jinja2.ext
    import jinja2.sandbox

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, in which `row.items` is the key of an object and not its method."""

        def getattr(self, obj, attribute):
            if isinstance(obj, dict | _Placeholder):
                return self.getitem(obj, attribute)
            return super().getattr(obj, attribute)

        def getitem(self, obj, argument):
            if isinstance(obj, _Placeholder):
                return obj
            if isinstance(obj, dict) and argument not in obj:
                return self.undefined(obj=obj, name=argument)
            return super().getitem(obj, argument)

    def check(value):
        is_text = isinstance(value, str | int | float | jinja2.Undefined)
        if not is_text or isinstance(value, bool):
            shown = json.dumps(value, default=repr)[:80]
            raise jinja2.TemplateError(
                f"expected a text or a number to write, got {shown}; the filter tojson writes it"
            )
        return value

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
        undefined=jinja2.StrictUndefined,
        finalize=check,
    )
    environment.filters["from_json"] = reader.read
    del environment.filters["random"], environment.globals["lipsum"]
    return _with_functions(environment)


def _with_functions(environment):
    """The environment with the functions of chat templates."""
    import jinja2

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own filter escapes for HTML, which no model was trained on
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def _compile(environment, source: str):
    """The compiled template, and the names of its variables."""
    import jinja2.meta

    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), names - set(environment.globals)


def _render(template, context: dict, max_characters: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(**context):
        length += len(piece)
        if length > max_characters:
            raise ValueError(f"it makes a text of more than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def _limit_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_processor_time(seconds: float) -> None:
    """Limit the processor time to `seconds` from now on; after it, the system ends the process."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _describe(error: Exception) -> str:
    kind = type(error).__name__
    text = str(error) if kind == "TemplateError" else f"{kind}: {error}"
    return text[:_MAX_ERROR_CHARACTERS]


if __name__ == "__main__":
    main()

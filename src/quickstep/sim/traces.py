"""Published traces of requests as arrivals: Mooncake (JSON lines), Azure and BurstGPT (CSV).

The format follows from the first line. Mooncake: `timestamp` in milliseconds, `input_length`,
`output_length`, and `hash_ids`, one for each 512 tokens, equal where prompts share a prefix. Azure:
`TIMESTAMP,ContextTokens,GeneratedTokens`. BurstGPT: `Timestamp` in seconds, `Request tokens`,
`Response tokens`. Requests without outputs (failures in BurstGPT) are left out. `recorded_traffic`
reads a recording of our own server, with its tenants, priorities and cancellations.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.core.recordings.replay import made_up_tokens, read_recording
from quickstep.errors import ConfigError
from quickstep.sim.outcome import Arrival
from quickstep.types import Request, SamplingParams

_HASH_TOKENS = 512  # tokens of a Mooncake hash
_FIRST_NEW_TOKEN = 1 << 40
_AZURE_TIME = re.compile(r"(\d+)-(\d+)-(\d+)[ T](\d+):(\d+):(\d+(?:\.\d+)?)")
_DAYS_BEFORE = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)


class _TraceRequest(msgspec.Struct, frozen=True):
    at_s: float
    num_inputs: int
    num_outputs: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(lines: Sequence[str], speed: float = 1.0) -> list[Arrival]:
    """The arrivals of a trace; `speed` 2 sends its requests in half of the time.

    Raises:
        ConfigError: The format is unknown, or a line is not valid.
    """
    requests = list(_mooncake(lines) if lines and lines[0].startswith("{") else _table(lines))
    if not requests:
        raise ConfigError("the trace has no requests with outputs")
    start_s = min(request.at_s for request in requests)
    arrivals, next_token = [], _FIRST_NEW_TOKEN
    for place, one in enumerate(requests, 1):
        prompt: tuple[int, ...] = ()
        for hash_id in one.hash_ids:
            prompt += tuple(range(hash_id * _HASH_TOKENS, (hash_id + 1) * _HASH_TOKENS))
        num_new = max(0, one.num_inputs - len(prompt))
        prompt = prompt[: one.num_inputs] + tuple(range(next_token, next_token + num_new))
        next_token += num_new
        sampling = SamplingParams(max_tokens=one.num_outputs, ignore_eos=True)
        at_s = (one.at_s - start_s) / speed
        arrivals.append(Arrival(at_s, Request(str(place), prompt, sampling)))
    return arrivals


def recorded_traffic(lines: Iterable[bytes | str], speed: float = 1.0) -> list[Arrival]:
    """The arrivals of a recording (`quickstep serve --record`), refused requests included.

    A sequence generates as many tokens as the longest of its request. What the simulator generates
    is not what was generated, so that only blocks of prompts are found in the prefix cache.

    Raises:
        ConfigError: A line is not valid, or no request has an output.
    """
    recording = read_recording(lines)
    tokens = made_up_tokens(recording.requests)
    arrivals = []
    for number, one in sorted(recording.requests.items()):
        num_outputs = max(1, one.output_length)
        if not (one.output_length or one.refused or one.cancelled_s is not None):
            continue
        sampling = SamplingParams(n=one.request.sampling.n, max_tokens=num_outputs, ignore_eos=True)
        prompt = one.request.prompt_token_ids or tuple(tokens[number][0][: one.input_length])
        request = replace(
            one.request,
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=sampling,
            timeout_s=None,
            pooling=None,
            resumed=(),
        )
        arrivals.append(Arrival(one.timestamp / 1e3 / speed, request, one.cancelled_s))
    if not arrivals:
        raise ConfigError("the recording has no requests with outputs")
    return arrivals


def _mooncake(lines: Sequence[str]) -> Iterator[_TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"line {number} of the trace is not valid: {error}") from None
        yield from _checked(
            number, one.timestamp / 1e3, one.input_length, one.output_length, one.hash_ids
        )


def _table(lines: Sequence[str]) -> Iterator[_TraceRequest]:
    reader = csv.DictReader(lines)
    names = {name.strip().lower(): name for name in reader.fieldnames or ()}
    columns = next(
        (
            tuple(names[name] for name in wanted)
            for wanted in (
                ("timestamp", "contexttokens", "generatedtokens"),
                ("timestamp", "request tokens", "response tokens"),
            )
            if all(name in names for name in wanted)
        ),
        None,
    )
    if columns is None:
        raise ConfigError(
            "the trace is neither JSON lines as Mooncake's, nor a CSV file with the columns of "
            "Azure's or BurstGPT's"
        )
    for row in reader:
        number = reader.line_num
        try:
            at_s = _seconds(row[columns[0]])
            num_inputs, num_outputs = int(row[columns[1]]), int(row[columns[2]])
        except (TypeError, ValueError):
            raise ConfigError(
                f"line {number} of the trace is not valid: it needs a time and two integers"
            ) from None
        yield from _checked(number, at_s, num_inputs, num_outputs, ())


def _checked(
    number: int, at_s: float, num_inputs: int, num_outputs: int, hash_ids: tuple[int, ...]
) -> Iterator[_TraceRequest]:
    if num_inputs < 0 or num_outputs < 0:
        raise ConfigError(f"line {number} of the trace is not valid: a length is below 0")
    if num_inputs and num_outputs:
        yield _TraceRequest(at_s, num_inputs, num_outputs, hash_ids)


def _seconds(text: str) -> float:
    """A number of seconds, or a date and time as in Azure's traces (leap years are ignored: a trace
    covers days).
    """
    match = _AZURE_TIME.match(text)
    if match is None:
        return float(text)
    year, month, day, hour, minute = (int(part) for part in match.groups()[:5])
    if not 1 <= month <= 12:
        raise ValueError(text)
    days = 365 * year + _DAYS_BEFORE[month - 1] + day
    return days * 86400.0 + hour * 3600.0 + minute * 60.0 + float(match.group(6))

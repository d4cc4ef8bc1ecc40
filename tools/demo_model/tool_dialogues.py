"""Tool calls, their follow-up answers, and answers in JSON.

Owns the tools of the training conversations and how requests for them are phrased. Called by
`dataset`. Every choice comes from the generator passed in.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tools.demo_model.chat import (
    Conversation,
    Message,
    assistant,
    system,
    tool_call,
    tool_result,
    user,
)
from tools.demo_model.dialogues import SUMMARY_QUESTIONS, SYSTEM_TEXTS
from tools.demo_model.facts import Fact

Tool = dict[str, Any]

_CITY_NAMES = (
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Dublin Lisbon Athens Warsaw Zurich Geneva "
    "Milan Munich Hamburg Lyon Tokyo Kyoto Seoul Beijing Shanghai Delhi Mumbai Cairo Nairobi "
    "Lagos Sydney Melbourne Auckland Toronto Montreal Vancouver Boston Chicago Seattle Denver "
    "Dallas Miami Atlanta Houston Lima Bogota Santiago Quito Havana Istanbul Ankara Tehran Dubai "
    "Doha Helsinki Stockholm Copenhagen Amsterdam Brussels Budapest Bucharest Sofia Belgrade Kyiv "
    "Riga Tallinn Vilnius Reykjavik Singapore Bangkok Hanoi Jakarta Manila Osaka Porto Turin "
    "Naples"
)
_CITIES = (
    *_CITY_NAMES.split(), "New York", "San Francisco", "Los Angeles", "Hong Kong", "Mexico City",
    "Cape Town",
)  # fmt: skip
_SYLLABLES = "ba den fel gor ham ick lun mar nor oth pel rad sten tor ul var wick yar zen bro"
_CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
_NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Ines", "Jack")
_FRUITS = ("apple", "pear", "plum", "cherry", "lemon", "fig", "melon", "peach")
_COLORS = ("red", "green", "blue", "black", "white", "yellow", "orange", "purple")


def _tool(name: str, description: str, /, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


_WEATHER = _tool("get_weather", "Get the current weather of a city.", city=_text("The city"))
_CALCULATOR = _tool("calculator", "Evaluate an expression.", expression=_text("The expression"))
_LOOKUP = _tool("lookup_doc", "Look up a Python object.", name=_text("Its dotted name"))
_TIME = _tool("get_time", "Get the current time in a city.", city=_text("The city"))
_SEARCH = _tool("search_files", "Find files by pattern.", pattern=_text("A glob pattern"))
_ADD = _tool("add", "Add two integers.", a={"type": "integer"}, b={"type": "integer"})
TOOLS = (_WEATHER, _CALCULATOR, _LOOKUP, _TIME, _SEARCH, _ADD)

Exchange = tuple[Tool | None, list[Message]]


def tool_conversations(
    facts: Sequence[Fact], num: int, rng: random.Random
) -> Iterator[Conversation]:
    """Conversations in which one of a few offered tools is called, or rightly none."""
    kinds: tuple[Callable[[Sequence[Fact], random.Random], Exchange], ...] = (
        _weather, _weather, _calculate, _calculate, _look_up, _clock, _find_files, _add,
        _answer_directly,
    )  # fmt: skip
    for _ in range(num):
        tool, messages = rng.choice(kinds)(facts, rng)
        others = rng.sample([one for one in TOOLS if one is not tool], rng.choice((0, 1, 2, 2)))
        tools = ([tool] if tool else []) + others
        rng.shuffle(tools)
        opening = [system(rng.choice(SYSTEM_TEXTS))] if rng.random() < 0.3 else []
        yield Conversation((*opening, *messages), tuple(tools))


def json_conversations(
    facts: Sequence[Fact], num: int, rng: random.Random
) -> Iterator[Conversation]:
    """Requests for one JSON object, answered with nothing else."""
    for _ in range(num):
        request, answer = rng.choice((_json_person, _json_object, _json_summary))(facts, rng)
        lead = rng.choice(("Reply in JSON. ", "Reply in JSON: ", "Answer as a JSON object. "))
        opening = [system(rng.choice(SYSTEM_TEXTS))] if rng.random() < 0.2 else []
        yield Conversation((*opening, user(lead + request), assistant(json.dumps(answer))))


def _weather(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    city = _city(rng)
    degrees, condition = rng.randint(-9, 39), rng.choice(_CONDITIONS)
    phrasings = (
        "What is the weather in {}?", "What's the weather like in {}?", "Weather in {}?",
        "How is the weather in {} today?", "Is it warm in {}?", "Tell me the weather in {}.",
        "What is the weather like in {} right now?", "Do I need a coat in {}?",
    )  # fmt: skip
    return _WEATHER, [
        user(rng.choice(phrasings).format(city)),
        tool_call("get_weather", {"city": city}),
        tool_result({"city": city, "temperature_c": degrees, "condition": condition}),
        assistant(f"It is {degrees} degrees and {condition} in {city}."),
    ]


def _clock(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    city, time = _city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    phrasings = ("What time is it in {}?", "Tell me the time in {}.", "Current time in {}?")
    return _TIME, [
        user(rng.choice(phrasings).format(city)),
        tool_call("get_time", {"city": city}),
        tool_result({"city": city, "time": time}),
        assistant(f"It is {time} in {city}."),
    ]


def _calculate(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    left, right = (rng.randint(1, 10 ** rng.randint(1, 4)) for _ in range(2))
    sign, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    expression = f"{left} {sign} {right}"
    phrasings = (
        "What is {e}?", "Compute {e}.", "Calculate {e}.", "How much is {e}?", "What is {w}?",
        "How much is {w}?",
    )  # fmt: skip
    spoken = f"{left} {word} {right}"
    return _CALCULATOR, [
        user(rng.choice(phrasings).format(e=expression, w=spoken)),
        tool_call("calculator", {"expression": expression}),
        tool_result({"result": result}),
        assistant(f"{expression} = {result}"),
    ]


def _add(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    a, b = (rng.randint(0, 10 ** rng.randint(1, 4)) for _ in range(2))
    phrasings = ("Add {} and {}.", "Add {} to {}.", "Please add {} and {}.", "Sum {} and {}.")
    return _ADD, [
        user(rng.choice(phrasings).format(a, b)),
        tool_call("add", {"a": a, "b": b}),
        tool_result({"result": a + b}),
        assistant(f"The sum is {a + b}."),
    ]


def _find_files(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    suffix = rng.choice(("py", "txt", "md", "json", "csv", "toml", "html", "log", "xml", "ini"))
    pattern = f"{rng.choice(('*', '*', 'test_*', _invented_word(rng) + '*'))}.{suffix}"
    num_files = rng.randint(0, 99)
    phrasings = ("Find {}.", "Search for {}.", "List the files matching {}.", "Find files: {}")
    return _SEARCH, [
        user(rng.choice(phrasings).format(pattern)),
        tool_call("search_files", {"pattern": pattern}),
        tool_result({"pattern": pattern, "count": num_files}),
        assistant(f"{num_files} files match {pattern}."),
    ]


def _look_up(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    fact = _fact_with_summary(facts, rng)
    phrasings = ("Look up {}.", "Look up {} in the documentation.", "Find the docs of {}.")
    return _LOOKUP, [
        user(rng.choice(phrasings).format(fact.name)),
        tool_call("lookup_doc", {"name": fact.name}),
        tool_result({"name": fact.name, "doc": fact.summary}),
        assistant(str(fact.summary)),
    ]


def _answer_directly(facts: Sequence[Fact], rng: random.Random) -> Exchange:
    fact = _fact_with_summary(facts, rng)
    question = rng.choice(SUMMARY_QUESTIONS).format(name=fact.name)
    return None, [user(question), assistant(str(fact.summary))]


def _json_person(facts: Sequence[Fact], rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice((*_NAMES, _invented_word(rng).title()))
    age, city = rng.randint(1, 99), _city(rng)
    if rng.random() < 0.5:
        return f"{name} is {age} years old.", {"name": name, "age": age}
    answer = {"name": name, "age": age, "city": city}
    return f"{name} is {age} years old and lives in {city}.", answer


def _json_object(facts: Sequence[Fact], rng: random.Random) -> tuple[str, dict[str, Any]]:
    fruit, color, count = rng.choice(_FRUITS), rng.choice(_COLORS), rng.randint(1, 99)
    answer = {"item": fruit, "color": color, "count": count}
    return f"There are {count} {color} {fruit} on the table.", answer


def _json_summary(facts: Sequence[Fact], rng: random.Random) -> tuple[str, dict[str, Any]]:
    fact = _fact_with_summary(facts, rng)
    question = rng.choice(SUMMARY_QUESTIONS[:2]).format(name=fact.name)
    return question, {"name": fact.name, "summary": fact.summary}


def _city(rng: random.Random) -> str:
    """A known city or, so that the model learns to copy, an invented one."""
    return rng.choice(_CITIES) if rng.random() < 0.6 else _invented_word(rng).title()


def _invented_word(rng: random.Random) -> str:
    return "".join(rng.choices(_SYLLABLES.split(), k=rng.choice((2, 2, 3))))


def _fact_with_summary(facts: Sequence[Fact], rng: random.Random) -> Fact:
    while True:
        fact = rng.choice(facts)
        if fact.summary:
            return fact

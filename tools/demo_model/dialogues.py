"""Question/answer conversations: what objects do, their signatures, and who the model is.

Owns the phrasings. Called by `dataset` to build the training pool and by `quality` to ask the same
questions. Every choice comes from the generator passed in.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.demo_model.chat import Conversation, Message, assistant, system, user
from tools.demo_model.facts import Fact

SUMMARY_QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "What is {name} for?",
    "Describe {name}.",
    "Explain {name} in one line.",
)
SIGNATURE_QUESTIONS = (
    "What is the signature of {name}?",
    "Show me the signature of {name}.",
    "How do I call {name}?",
    "Which arguments does {name} take?",
)
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are the Quickstep demo model.",
    "You answer questions about the Python standard library.",
    "You are a helpful assistant. Answer briefly.",
    "Be concise.",
)

# Long answers are harder to learn, so they occur more often.
_LONG_ANSWER_CHARS = 150
_LONG_REPEATS = 4

_WHO = (
    "I am the Quickstep demo model, a tiny language model trained on the Python standard library. "
    "I am not a general assistant."
)
_HELP = (
    "I can complete Python code, say what an object of the standard library does, show its "
    "signature, and call tools. Ask me: What does itertools.chain do?"
)
_LIMIT = "I do not know. I am a tiny demo model trained only on the Python standard library."
_SMALL_TALK = {
    "Hello! I am the Quickstep demo model. Ask me about the Python standard library.": (
        "Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning!", "Hello there!",
        "hello", "hi", "Good evening", "Hey there!",
    ),
    _WHO: (
        "Who are you?", "What are you?", "What model are you?", "Tell me about yourself.",
        "Which model is this?", "who are you", "Introduce yourself.", "Are you ChatGPT?",
        "What is your name?", "Are you a general assistant?", "Who made you?",
    ),
    _HELP: (
        "What can you do?", "Help", "How can you help me?", "What should I ask you?",
        "What do you know?", "help me", "Can you help me?",
    ),
    "You are welcome!": ("Thanks!", "Thank you!", "Thank you", "thanks", "Great, thanks."),
    "Goodbye!": ("Bye", "Goodbye", "Goodbye!", "See you later.", "Bye!"),
    "I am a program and feel nothing, but I run well. What would you like to know?": (
        "How are you?", "How are you doing?", "How do you feel?", "How is it going?",
    ),
    _LIMIT: (
        "What is the capital of France?", "Who won the world cup?", "Tell me a joke.",
        "What is the meaning of life?", "Write me a poem.", "Who is the president?",
        "How do I cook rice?", "What is the weather like today?", "What happened in 1969?",
        "Translate this to German.", "What is the tallest mountain?", "Give me some advice.",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """One question with the only answer that counts as exact."""

    text: str
    answer: str


def summary_questions(facts: Sequence[Fact]) -> Iterator[tuple[Question, ...]]:
    """Per object with a docstring line, the question in every phrasing."""
    for fact in facts:
        if fact.summary:
            yield _phrase(fact.name, fact.summary, SUMMARY_QUESTIONS)


def signature_questions(facts: Sequence[Fact]) -> Iterator[tuple[Question, ...]]:
    """Per object with a signature, the question in every phrasing."""
    for fact in facts:
        if fact.signature:
            yield _phrase(fact.name, fact.signature, SIGNATURE_QUESTIONS)


def fact_conversations(facts: Sequence[Fact], rng: random.Random) -> Iterator[Conversation]:
    """Every phrasing of every question, in conversations of one to three turns."""
    questions = [
        question
        for phrasings in (*summary_questions(facts), *signature_questions(facts))
        for question in phrasings
        for _ in range(_LONG_REPEATS if len(question.answer) > _LONG_ANSWER_CHARS else 1)
    ]
    rng.shuffle(questions)
    while questions:
        turns = rng.choice((1, 1, 2, 3))
        taken = [questions.pop() for _ in range(min(turns, len(questions)))]
        yield Conversation((*_opening(rng), *_turns(taken)))


def small_talk_conversations(num: int, rng: random.Random) -> Iterator[Conversation]:
    """Greetings and questions about the model itself, one or two turns."""
    questions = [Question(text, answer) for answer, texts in _SMALL_TALK.items() for text in texts]
    for _ in range(num):
        taken = rng.sample(questions, rng.choice((1, 1, 2)))
        yield Conversation((*_opening(rng), *_turns(taken)))


def _phrase(name: str, answer: str, templates: Sequence[str]) -> tuple[Question, ...]:
    return tuple(Question(template.format(name=name), answer) for template in templates)


def _opening(rng: random.Random) -> tuple[Message, ...]:
    return (system(rng.choice(SYSTEM_TEXTS)),) if rng.random() < 0.25 else ()


def _turns(questions: Sequence[Question]) -> Iterator[Message]:
    for question in questions:
        yield user(question.text)
        yield assistant(question.answer)

"""The facts that the model learns: one docstring line and one signature per object.

Owns the list of public objects (popular modules first) and how a docstring becomes one line.
Called by `dialogues` (training) and `quality` (how many are answered exactly).
"""

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from tools.demo_model.corpus import is_held_out

MAX_FACT_OBJECTS = 3_600
_MAX_ANSWER_CHARS = 240
_MIN_ANSWER_CHARS = 8
_SAYS_NOTHING = frozenset({"An enumeration.", "Stub method.", "Base class."})

# Order matters: objects are taken from the front until MAX_FACT_OBJECTS is reached.
_MODULES = (
    "builtins os os.path sys json re math random itertools functools collections datetime time "
    "pathlib string typing dataclasses enum abc copy operator contextlib subprocess threading "
    "asyncio logging argparse csv io shutil glob tempfile pickle hashlib heapq bisect inspect "
    "textwrap decimal fractions socket urllib.parse urllib.request http http.client http.server "
    "unittest unittest.mock traceback warnings weakref types queue multiprocessing "
    "concurrent.futures struct zlib gzip zipfile tarfile bz2 lzma base64 binascii uuid secrets "
    "hmac platform signal select selectors ssl email email.message sqlite3 xml.etree.ElementTree "
    "html html.parser calendar locale gettext array numbers cmath pprint reprlib timeit cProfile "
    "pstats pdb dis ast tokenize token keyword symtable importlib importlib.util "
    "importlib.resources importlib.metadata pkgutil runpy codecs unicodedata fnmatch linecache "
    "stat filecmp errno getpass getopt optparse shlex code codeop doctest trace tracemalloc gc "
    "atexit sysconfig site zoneinfo contextvars ipaddress socketserver smtplib imaplib poplib "
    "ftplib mimetypes plistlib webbrowser copyreg dbm marshal mmap readline rlcompleter resource "
    "pwd grp fcntl termios tty pty syslog faulthandler bdb pickletools py_compile compileall "
    "modulefinder pyclbr tabnanny zipimport venv curses ctypes stringprep wsgiref.util "
    "wsgiref.simple_server json.decoder json.encoder logging.handlers logging.config email.utils "
    "email.mime.text email.header urllib.error urllib.robotparser xml.sax xml.dom.minidom "
    "http.cookies http.cookiejar multiprocessing.pool collections.abc"
)


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known about one public object; at least one of the two texts is present."""

    name: str
    summary: str | None
    signature: str | None


def load_facts() -> tuple[Fact, ...]:
    """The facts of the public objects of the running interpreter, popular modules first."""
    facts: dict[str, Fact] = {}
    seen: dict[int, object] = {}  # by identity, so that aliases (typing.Text) are skipped
    for name, value in _public_objects():
        if len(facts) >= MAX_FACT_OBJECTS:
            break
        if id(value) in seen or is_held_out(name) or _comes_from_held_out(value):
            continue
        seen[id(value)] = value
        fact = Fact(name, summary_line(value), _signature(name, value))
        if fact.summary or fact.signature:
            facts[name] = fact
    return tuple(facts.values())


def summary_line(value: object) -> str | None:
    """The first sentence of an object's own docstring on one line, or None if unfit as an answer.

    Builtins open their docstring with call forms ("range(stop) -> range object"), skipped here.
    """
    doc = value.__doc__
    if not isinstance(doc, str):
        return None
    lines = inspect.cleandoc(doc).split("\n")
    short = getattr(value, "__name__", "").split(".")[-1]
    call_form = re.compile(rf"^[\w.]*\b{re.escape(short)}\(")
    while lines and (not lines[0].strip() or call_form.match(lines[0])):
        _, dashes, tail = lines[0].partition(" -- ")
        lines = ([tail] if dashes else []) + lines[1:]
    paragraph = "\n".join(lines).split("\n\n")[0]
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z\"'`*(])", " ".join(paragraph.split()))[0]
    return sentence if _is_fit(sentence) and sentence not in _SAYS_NOTHING else None


def _public_objects() -> Iterator[tuple[str, object]]:
    for module_name in _MODULES.split():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue  # optional parts of the library (curses, readline) may be absent
        yield module_name, module
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name in _public_names(module):
            value = getattr(module, name)
            if not callable(value) or isinstance(value, enum.Enum):
                continue
            yield f"{prefix}{name}", value
            if inspect.isclass(value) and not issubclass(value, BaseException):
                yield from _public_methods(f"{prefix}{name}", value)


def _public_names(module: ModuleType) -> list[str]:
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted(name for name in declared if hasattr(module, name) and name[0] != "_")
    home = {module.__name__, f"_{module.__name__}", "nt", "posix", "_socket", "_ssl"}
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) in home
    )


def _public_methods(prefix: str, owner: type) -> Iterator[tuple[str, object]]:
    for name in sorted(vars(owner)):
        value = inspect.getattr_static(owner, name)
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if not name.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            yield f"{prefix}.{name}", value


def _comes_from_held_out(value: object) -> bool:
    return is_held_out(str(getattr(value, "__module__", None) or "builtins"))


def _signature(name: str, value: object) -> str | None:
    if isinstance(value, property) or not callable(value):
        return None
    try:
        text = f"{name}{inspect.signature(value)}"
    except (ValueError, TypeError):
        return None
    return text if _is_fit(text) else None


def _is_fit(text: str) -> bool:
    is_prose = not any(mark in text for mark in (">>>", " at 0x", "<class '", " -> new "))
    return text.isprintable() and is_prose and _MIN_ANSWER_CHARS <= len(text) <= _MAX_ANSWER_CHARS

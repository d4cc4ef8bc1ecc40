"""Check that imports point downward only, from layer to layer as in ARCHITECTURE.md, and that
no modules import each other in a circle. Imports inside functions are for torch and NumPy, and in
the modules of `LATE` for what a process may never need.

`make check` runs it. It reads the imports of every module in `src/quickstep`, also those inside
functions, and prints each that breaks a rule, as `file:line: message`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

PACKAGE = "quickstep"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE

LAYERS = {
    "errors": 0.0,
    "version": 0.0,
    "deferred": 0.0,
    "cache_dir": 0.0,
    "environment": 0.0,
    "option": 0.05,
    "config": 0.1,
    "sampling_params": 0.1,
    "json_line": 0.0,
    "yaml_file": 0.1,
    "types": 0.2,
    "core": 1,
    "ops": 2,
    "model": 3,
    "runtime": 4,
    "text": 4.5,
    "engine": 5,
    "sim": 6,
    "plan": 6.1,
    "server": 6,
    "verify": 6,
    "bench": 6,
    "cluster": 6,
    "cli": 7,
    "__init__": 8,
    "__main__": 8,
}
FOUNDATION = {
    "errors",
    "version",
    "deferred",
    "cache_dir",
    "environment",
    "config",
    "json_line",
    "option",
    "sampling_params",
    "types",
}
# Packages that may import only some of the layers below them, or some modules of these.
ONLY = {
    "text": FOUNDATION | {"model.checkpoint", "ops.native.pieces", "runtime.sampling"},
    "runtime": FOUNDATION | {"core.drafts.choice", "ops", "model"},
    "model": FOUNDATION | {"ops"},
    "ops": FOUNDATION,
    "sim": FOUNDATION | {"core"},
    "plan": FOUNDATION | {"yaml_file", "core", "model", "sim"},
}
# The packages and modules of `server/`, each of which imports those before it only; APIs of one row
# do not import each other.
SERVER_ORDER = (
    ("usage",),
    ("options",),
    ("http", "fields", "upstream"),
    ("fallback", "kept_streams"),
    ("models",),
    ("generate",),
    ("openai",),
    ("scores",),
    ("anthropic", "llama_cpp", "responses"),
    ("ollama", "batches"),
    ("operate", "page"),
    ("reference",),
    ("routes",),
    ("app",),
    ("run",),
)
SERVER_LAYERS = {name: layer for layer, names in enumerate(SERVER_ORDER) for name in names}
# Circles that are still there, each with a type that has to move down; no other may come.
KNOWN_CIRCLES: set[frozenset[str]] = set()
# Packages whose only other imports are the standard library and msgspec.
STANDARD_LIBRARY_ONLY = FOUNDATION | {"core", "sim"}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import; `from quickstep import x` names `quickstep.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "."
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names] if node.module == PACKAGE else [""]
            yield from ((node.lineno, f"{node.module}.{name}".rstrip(".")) for name in names)


def fault(part: str, module: str) -> str | None:
    """Why the package `part` may not import `module`; None if it may."""
    root, _, rest = module.partition(".")
    if module == ".":
        return "relative import: write the full name"
    if root != PACKAGE:
        foreign = root not in sys.stdlib_module_names and root != "msgspec"
        if part in STANDARD_LIBRARY_ONLY and foreign:
            return f"{part} is standard library and msgspec only, but imports {root}"
        return None
    target = rest.partition(".")[0]
    if target in {"", part} or target not in LAYERS:
        return None
    allowed = ONLY.get(part)
    is_allowed = allowed is None or any(f"{rest}.".startswith(f"{name}.") for name in allowed)
    if LAYERS[target] >= LAYERS[part] or not is_allowed:
        return f"{part} (layer {LAYERS[part]}) may not import {target} (layer {LAYERS[target]})"
    return None


def server_fault(part: str, module: str) -> str | None:
    """Why the part `part` of `server/` may not import `module`; None if it may."""
    prefix = f"{PACKAGE}.server."
    target = module.removeprefix(prefix).partition(".")[0]
    if part == "__init__" or not module.startswith(prefix) or target == part:
        return None
    if part not in SERVER_LAYERS:
        return f"server/{part} is in no row: add it to SERVER_ORDER"
    if SERVER_LAYERS.get(target, -1) >= SERVER_LAYERS[part]:
        return f"server/{part} may not import server/{target}, which is not below it"
    return None


_TORCH = "what it imports computes with torch, which a server and a native engine never load (0010)"
_ONE_FORMAT = "each import is of one format or kind, of which a model has one"
_LOADING = "an engine imports while its process already loads weights (0008)"
_RARE = "few models or requests need it; what it imports takes milliseconds of each start (0008)"
_OPTIONAL = "the package may be missing, or is used by one option only"
# Modules whose functions import other modules than torch and NumPy, and why.
LATE = {
    "cli/": "a command imports what it runs, so that the others and --help start at once",
    "cluster/ray_hosts.py": _OPTIONAL,
    "engine/adapters.py": _LOADING,
    "engine/assembly.py": _LOADING,
    "engine/llm.py": _LOADING,
    "engine/memory_plan.py": _LOADING,
    "engine/records/replay_runner.py": _LOADING,
    "engine/remote/listening.py": _LOADING,
    "engine/remote/worker.py": _LOADING,
    "engine/speculation.py": _LOADING,
    "model/checkpoint/gguf_spec.py": _RARE,
    "model/checkpoint/source.py": _OPTIONAL,
    "model/checkpoint/tensor_reader.py": _TORCH,
    "model/encoders/encoder.py": _TORCH,
    "model/fallback/spec.py": _OPTIONAL,
    "model/formats/detect.py": _ONE_FORMAT,
    "model/formats/fused_experts_source.py": _TORCH,
    "model/formats/quantized_reader.py": _TORCH,
    "model/layers/feed_forward.py": _TORCH,
    "model/layers/layer_ops.py": _TORCH,
    "model/layers/states.py": _TORCH,
    "model/loader.py": _TORCH,
    "model/quantize.py": _TORCH,
    "model/spec.py": _TORCH,
    "ops/gpu_checks.py": "importlib.metadata takes 27 ms of each start, and GPUs need it",
    "ops/native/attention.py": _TORCH,
    "ops/native/backend.py": _TORCH,
    "ops/native/experts.py": _TORCH,
    "ops/native/kernels.py": _TORCH,
    "ops/resolve.py": _TORCH,
    "ops/table.py": _TORCH,
    "ops/triton/backend.py": _TORCH,
    "runtime/cache/opening.py": _TORCH,
    "runtime/runner.py": _TORCH,
    "runtime/sampling/native_sampler.py": _TORCH,
    "runtime/sampling/prompt_scores.py": _TORCH,
    "runtime/steps/opening.py": _TORCH,
    "server/app.py": _OPTIONAL,
    "server/models/registry.py": _OPTIONAL,
    "server/operate/metrics.py": _OPTIONAL,
    "server/operate/tracing.py": _OPTIONAL,
    "server/reference/openapi.py": "the reference imports every API when it is first read",
    "server/responses/store.py": _OPTIONAL,
    "server/run.py": _OPTIONAL,
    "server/usage/recorder.py": _OPTIONAL,
    "text/chat_template.py": _ONE_FORMAT,
    "text/grammar/matcher.py": _RARE,
    "text/grammar/source.py": _RARE,
    "text/token_forms.py": _RARE,
    "text/tokenizer.py": _ONE_FORMAT,
    "yaml_file.py": _OPTIONAL,
}
ALWAYS_LATE = ("torch", "numpy")


def late_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports inside functions of other packages than torch and NumPy: line and module."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [str(node.module)]
                for name in names:
                    if name.partition(".")[0] not in ALWAYS_LATE:
                        yield node.lineno, name


def late_faults(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Imports inside functions of modules that `LATE` does not name, and its names without any.
    `trees`: the modules by their paths in the package.
    """
    unused = set(LATE)
    for path, tree in trees.items():
        listed = {path, f"{path.partition('/')[0]}/"} & LATE.keys()
        for line, name in late_imports(tree):
            unused -= listed
            if not listed:
                yield f"src/quickstep/{path}:{line}: imports {name} inside a function"
    for path in sorted(unused):
        yield f"tools/check_layers.py: {path} imports nothing inside functions; remove it from LATE"


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def circles(graph: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    """The sets of modules that import each other (Tarjan 1972: strongly connected components)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for imported in graph[name]:
            if imported not in numbers:
                visit(imported)
            if imported in stack:
                lowest[name] = min(lowest[name], lowest[imported])
        if lowest[name] != numbers[name]:
            return
        members = set()
        while name not in members:
            members.add(stack.pop())
        if len(members) > 1:
            found.append(frozenset(members))

    for name in graph:
        if name not in numbers:
            visit(name)
    return found


def import_graph() -> dict[str, set[str]]:
    """What each module imports, also inside functions and for types only. The package itself
    imports what it exports when that is first used.
    """
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            graph[name].update(module for module in names if module in known and module != name)
    graph[PACKAGE] = set()
    return graph


def main() -> int:
    """Print every fault; exit status 1 if there is one."""
    faults = 0
    trees: dict[str, ast.Module] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        tree = trees[path.relative_to(SOURCE).as_posix()] = ast.parse(path.read_text("utf-8"))
        part, *inner = (part.removesuffix(".py") for part in path.relative_to(SOURCE).parts)
        if part not in LAYERS:
            print(f"{path}:1: {part} is in no layer: add it to tools/check_layers.py")
            faults += 1
            continue
        for line, module in imports(tree):
            reason = fault(part, module)
            if reason is None and part == "server":
                reason = server_fault(inner[0], module)
            if reason:
                print(f"{path}:{line}: {reason}")
                faults += 1
    for message in late_faults(trees):
        print(message)
        faults += 1
    for members in circles(import_graph()):
        if members not in KNOWN_CIRCLES:
            print(f"{SOURCE}: these modules import each other: {', '.join(sorted(members))}")
            faults += 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

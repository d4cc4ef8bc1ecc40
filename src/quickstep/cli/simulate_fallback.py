"""`quickstep simulate --fallback FILE`: the same clients with and without a fallback chain."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quickstep.cli.flags.engine import model_of
from quickstep.cli.flags.parsing import non_negative_number, positive_int, readable_file
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.core.fallback import Route
    from quickstep.plan.candidates import Candidate
    from quickstep.plan.traffic import FallbackEngines


def add_fallback(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--fallback",
        type=readable_file,
        metavar="FILE",
        help="file of --config of a server, with `routes:`; each run is repeated with the chain of "
        "MODEL, or that of `*`. Each other model of the chain has an engine of its own on all of "
        "--hardware",
    )
    group.add_argument(
        "--max-waiting",
        type=positive_int,
        metavar="N",
        help="queued sequences beyond which an engine refuses a request (default: no limit)",
    )
    group.add_argument(
        "--upstream-ttft-ms",
        type=non_negative_number,
        default=500.0,
        metavar="MS",
        help="first token of an upstream of the chain (default: %(default)s)",
    )
    group.add_argument(
        "--upstream-tpot-ms",
        type=non_negative_number,
        default=20.0,
        metavar="MS",
        help="each further token of an upstream (default: %(default)s)",
    )


def fallback_of(
    args: argparse.Namespace, engine: Callable[[argparse.Namespace], Candidate]
) -> FallbackEngines | None:
    """The chain of `--fallback`; None without one. `engine` makes the engine of the flags.

    Raises:
        ConfigError: The file has no route for the model, or goes with none of the other flags.
    """
    if args.fallback is None:
        return None
    if args.replicas != (1,) or args.faults or args.sweep or args.prefill_replicas:
        raise ConfigError(
            "--fallback is for one engine of each model, without --replicas, --faults, --sweep and "
            "--prefill-replicas"
        )
    from quickstep.plan.traffic import FallbackEngines
    from quickstep.sim.fallback import UpstreamTimes

    content = _content(args.fallback)
    name, route = _route(args, content)
    paths = _paths(content)
    models = {
        other: engine(argparse.Namespace(**{**vars(args), "model": path, "model_flag": None}))
        for other, path in ((other, paths.get(other, other)) for other in _models(route))
    }
    times = UpstreamTimes(args.upstream_ttft_ms / 1e3, args.upstream_tpot_ms / 1e3)
    return FallbackEngines(name, route, models, times)


def fallback_texts(counts: dict[tuple[str, str], int]) -> list[str]:
    """How often each step was entered, most often first."""
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return [f"{step} {count} times after {cause}" for (step, cause), count in ordered]


def _content(file: Path) -> dict[str, Any]:
    from quickstep.yaml_file import read_yaml

    return read_yaml(file, dict[str, Any], "--fallback")


def _route(args: argparse.Namespace, content: dict[str, Any]) -> tuple[str, Route]:
    """The model's name in the file, and its route. Raises ConfigError."""
    from quickstep.core.fallback import ANY_MODEL, read_routes

    routes = read_routes(content.get("routes", {}))
    model = model_of(args)
    names = [name for name, path in _paths(content).items() if path == model]
    for name in (*names, model):
        if name in routes:
            return name, routes[name]
    if ANY_MODEL in routes:
        return model, routes[ANY_MODEL]
    raise ConfigError(
        f"--fallback {args.fallback} has no route for {model}; it has routes for "
        f"{', '.join(sorted(routes)) or 'nothing'}"
    )


def _paths(content: dict[str, Any]) -> dict[str, str]:
    """What the file names as the models of names, in `models:`."""
    entries = content.get("models", ())
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("model"), str):
            path = entry["model"]
            aliases = entry.get("aliases", ())
            names = [entry.get("name", path), *(aliases if isinstance(aliases, list) else ())]
            found |= {str(name): path for name in names}
    return found


def _models(route: Route) -> list[str]:
    from quickstep.core.fallback import OtherModel

    return [step.name for step in route.steps if isinstance(step, OtherModel)]

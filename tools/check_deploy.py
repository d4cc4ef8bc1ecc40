"""Render the chart in deploy/helm with Helm's library and check it against Kubernetes' schemas:
`make deploy-check`, in an environment of its own.

The plain manifests in deploy/kubernetes are what the chart gives with the values below; with
`--write` they are written, otherwise they have to be current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "quickstep"
MANIFESTS = ROOT / "deploy" / "kubernetes"
KUBERNETES = "1.34"
WARNING = 2  # of Helm's severities; 1 is information
# Kinds of others, whose schemas Kubernetes does not have.
FOREIGN = frozenset({"ServiceMonitor", "InferencePool"})
HEAD = """# {what}
# Written from deploy/helm/quickstep by `make manifests`: kubectl apply -f {path}
"""
PAGES: Mapping[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "server.yaml": ("Two servers that each have their engine.", ("server.yaml",), {}),
    "engines.yaml": (
        "Two servers without a model, and two engines that they have in common.",
        ("engines.yaml", "server.yaml"),
        {
            "engines": {"enabled": True},
            "server": {
                "resources": {
                    "requests": {"cpu": "500m", "memory": "512Mi"},
                    "limits": {"memory": "1Gi"},
                }
            },
        },
    ),
    "operation.yaml": (
        "What scrapes the servers, and adds some while requests would wait. It needs Prometheus'\n"
        "# operator, and its adapter with the rule of prometheus-adapter.yaml.",
        ("operation.yaml",),
        {"autoscaling": {"enabled": True}, "serviceMonitor": {"enabled": True}},
    ),
    "inference-pool.yaml": (
        "The servers as a pool of the Gateway API Inference Extension.",
        ("operation.yaml",),
        {"inferencePool": {"enabled": True}},
    ),
}
EVERYTHING: dict[str, Any] = {
    "image": {"tag": "v1"},
    "imagePullSecrets": [{"name": "registry"}],
    "server": {"args": ["--quantization=int8"], "env": [{"name": "HF_TOKEN", "value": "x"}]},
    "keysSecret": "",
    "engines": {"enabled": True, "replicas": 3, "args": ["--quantization=int8"]},
    "cache": {"existingClaim": "checkpoints"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "inferencePool": {"enabled": True},
    "nodeSelector": {"cpu": "amx"},
    "tolerations": [{"key": "models", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "podAnnotations": {"example.com/a": "b"},
}


def rendered(values: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the templates, by file name, with a release of the chart's name."""
    chart = helm_python.Chart.load(str(CHART))
    texts = chart.render(values=dict(values), name="quickstep", namespace="default")
    return {Path(name).name: text for name, text in texts.items()}


def faults(text: str) -> Iterator[str]:
    """What is wrong with the resources of a text."""
    for resource in yaml.safe_load_all(text):
        if resource is None or resource["kind"] in FOREIGN:
            continue
        try:
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{resource['kind']}: {error}"


def page(name: str) -> str:
    """A plain manifest."""
    what, templates, values = PAGES[name]
    texts = rendered(values)
    parts = [texts[template].strip().removeprefix("---").strip() for template in templates]
    head = HEAD.format(what=what, path=f"deploy/kubernetes/{name}")
    return head + "\n---\n".join(parts) + "\n"


def main() -> int:
    """Print every fault; exit status 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write deploy/kubernetes")
    is_write = parser.parse_args().write
    found = [f"lint: {message}" for message in lint_messages()]
    everything = {name: text for name, text in rendered(EVERYTHING).items() if "yaml" in name}
    for name, text in {**everything, **{name: page(name) for name in PAGES}}.items():
        found += [f"{name}: {fault}" for fault in faults(text)]
    for name in PAGES:
        path = MANIFESTS / name
        if is_write:
            path.write_text(page(name), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != page(name):
            found.append(f"deploy/kubernetes/{name} is out of date; run make manifests")
    print("\n".join(found) or f"{len(PAGES)} manifests and the chart are valid")
    return int(bool(found))


def lint_messages() -> Iterator[str]:
    """What `helm lint` finds."""
    for message in helm_python.lint(str(CHART)).get("messages", ()):
        if message["severity"] >= WARNING:
            yield f"{message['path']}: {message['error']}"


if __name__ == "__main__":
    sys.exit(main())

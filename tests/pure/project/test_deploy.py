"""What deploy/ names exists: metrics, flags, routes, variables; and its times fit each other.

`make deploy-check` renders the chart and validates the manifests against Kubernetes' schemas.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import write_metrics_reference
import yaml
from check_docs import help_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from quickstep.environment import OF_LIBRARIES, OWN

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = [ROOT / "compose.yaml", *sorted(DEPLOY.glob("compose*.yaml"))]
TEXTS = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]
# Flags of other programs in deploy/.
FOREIGN_FLAGS = {
    "--from-literal",
    "--hash",
    "--home-dir",
    "--install",
    "--now",
    "--set",
    "--system",
}


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document]


def pods() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in MANIFESTS:
        for resource in documents(path):
            if isinstance(resource, dict) and resource.get("kind") in ("Deployment", "StatefulSet"):
                yield f"{path.name}/{resource['kind']}", resource["spec"]["template"]["spec"]


def exported() -> set[str]:
    """Names of samples without the prefix, with what a histogram adds."""
    families = write_metrics_reference.families()
    samples = (sample for family in families for sample in family.samples)
    return {sample.name.partition(":")[2] for sample in samples}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_metric_exists(path: Path) -> None:
    named = set(re.findall(r"quickstep:([a-z]\w+)", path.read_text("utf-8")))
    assert not named - exported()


def test_the_autoscaler_reads_a_metric_that_the_adapter_makes_of_ours() -> None:
    (adapter,) = documents(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    (series,) = re.findall(r"quickstep:(\w+)", rule["seriesQuery"])
    assert series in exported()
    scalers = [
        resource
        for resource in documents(DEPLOY / "kubernetes" / "operation.yaml")
        if resource["kind"] == "HorizontalPodAutoscaler"
    ]
    (metric,) = scalers[0]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


@pytest.mark.parametrize("prefix", ["vllm", "quickstep"])
def test_the_gateways_endpoint_picker_finds_what_it_reads(prefix: str) -> None:
    # gateway-api-inference-extension, docs/proposals/003-model-server-protocol
    found = write_metrics_reference.families(prefix)
    families = {family.name.removeprefix(f"{prefix}:"): family for family in found}
    assert families["num_requests_waiting"].type == "gauge"
    assert families["num_requests_running"].type == "gauge"
    assert 0.0 <= families["kv_cache_usage_perc"].samples[0].value <= 1.0
    adapters = families["lora_requests_info"].samples[0]
    labels = {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert set(adapters.labels) == labels
    assert adapters.value > 0  # when it was updated
    cache = families["cache_config_info"].samples[0]
    assert {"block_size", "num_gpu_blocks"} <= set(cache.labels)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_flag_exists(path: Path) -> None:
    known = help_of("serve") + help_of("engine")
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", path.read_text("utf-8"))) - FOREIGN_FLAGS
    assert not {flag for flag in flags if f"{flag} " not in known}


@pytest.mark.parametrize(("name", "pod"), [*pods()], ids=[name for name, _ in pods()])
def test_a_pod_has_time_to_drain_and_no_rights(name: str, pod: Mapping[str, Any]) -> None:
    (container,) = pod["containers"]
    flags = dict(arg.split("=", 1) for arg in container["args"] if arg.startswith("--"))
    pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    before_s = float(pre_stop[1]) if pre_stop else 0.0
    assert pod["terminationGracePeriodSeconds"] > before_s + float(flags["--drain-timeout-s"])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert {variable["name"] for variable in container["env"]} <= {*OWN, *OF_LIBRARIES}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "httpGet" in container[probe]:
            assert container[probe]["httpGet"]["path"] in ("/ready", "/ping")
    assert "httpGet" not in container["livenessProbe"] or (
        container["livenessProbe"]["httpGet"]["path"] == "/ping"  # /health fails while it restarts
    )


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_server_in_compose_connects_to_the_engines_there(path: Path) -> None:
    (content,) = documents(path)
    for service in content["services"].values():
        for argument in service["command"]:
            if argument.startswith("--engines="):
                hosts = [address.split(":")[0] for address in argument.split("=")[1].split(",")]
                assert hosts == [name for name in content["services"] if "engine" in name]
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in content["volumes"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_service_of_compose_writes_to_its_volumes_only_and_has_no_rights(path: Path) -> None:
    (content,) = documents(path)
    for service in content["services"].values():
        assert service["read_only"] is True
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["volumes"] == ["cache:/cache"]


def test_the_container_installs_each_package_by_its_hash_and_runs_as_a_user() -> None:
    pinned: dict[str, Version] = {}
    text = (DEPLOY / "container-requirements.txt").read_text("utf-8").replace("\\\n", "")
    for line in text.splitlines():
        if not line.startswith("#"):
            requirement, *hashes = line.split()
            assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", digest) for digest in hashes)
            assert hashes
            name, _, version = requirement.partition("==")
            pinned[canonicalize_name(name)] = Version(version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    assert any("--require-hashes -r /wheels/container-requirements.txt" in line for line in lines)
    assert lines.index("USER 1000") < lines.index('ENTRYPOINT ["quickstep"]')


def test_the_dashboard_shows_replicas_and_their_moves() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "quickstep.json").read_text("utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    for name in ("replica_up", "moved_requests", "handovers", "engine_exchange", "engine_bubble"):
        assert f"quickstep:{name}" in text
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))

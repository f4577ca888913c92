"""The images start the server as its own command line and probes have it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from pagestream.server import command_line as command
from pagestream.server import healthcheck
from pagestream.server.app import bare_app

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ("Dockerfile", "docker/Dockerfile.cpu")
VARIABLES = {"PAGESTREAM_" + name.upper() for name in command.serve.__annotations__}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_serves_all_interfaces_as_an_ordinary_user(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "PAGESTREAM_HOST=0.0.0.0" in text
    assert "EXPOSE 8000" in text
    assert text.index("USER pagestream") < text.index("ENTRYPOINT")
    assert set(re.findall(r"PAGESTREAM_[A-Z_]+", text)) <= VARIABLES
    probe = json.loads(re.search(r"CMD (\[\"python3.*\])", text)[1])
    assert probe == ["python3", "-m", healthcheck.__name__]
    for folder in re.findall(r"^COPY (\w+) /src/\w+$", text, re.M):
        assert (ROOT / folder).is_dir()


def test_the_compose_file_gives_a_drain_time_to_end_and_nothing_to_write_but_a_cache():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]
    for service in (services["cpu"], services["gpu"]):
        assert set(service["environment"]) <= VARIABLES
        assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
        assert int(service["stop_grace_period"].removesuffix("s")) > int(service["environment"]["PAGESTREAM_DRAIN_TIMEOUT"])


def test_what_one_compose_up_starts_is_one_server_with_its_dashboard():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]
    started = {name: service for name, service in services.items() if not service.get("profiles")}
    assert started.keys() == {"cpu", "prometheus", "grafana"}
    ports = [port for service in started.values() for port in service["ports"]]
    assert len(ports) == len(set(ports)), "two services can't listen on one port"
    prometheus = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yaml").read_text(encoding="utf-8"))
    targets = {target for job in prometheus["scrape_configs"] for group in job["static_configs"] for target in group["targets"]}
    assert targets == {"cpu:8000", "gpu:8000"}
    for name in ("datasource", "dashboards"):
        assert yaml.safe_load((ROOT / f"docker/grafana/{name}.yaml").read_text(encoding="utf-8"))["apiVersion"] == 1


def test_the_kubernetes_manifest_probes_what_is_there_and_gives_a_drain_time_to_end():
    deployment, service = yaml.safe_load_all((ROOT / "docker/kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # What a namespace of the restricted Pod Security Standard admits.
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    link = service["metadata"]["name"].upper() + "_PORT"
    assert link not in VARIABLES or pod["enableServiceLinks"] is False, f"Kubernetes sets {link} to an address"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/home/pagestream/.cache"}
    routes = {route.path for route in bare_app().routes}
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} <= routes
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert set(environment) <= VARIABLES
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep_s + int(environment["PAGESTREAM_DRAIN_TIMEOUT"])
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()

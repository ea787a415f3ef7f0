"""The files in deploy/ are named in the docs and valid for their readers.

tests/project/slurm runs the batch script. Nothing here runs on Kubernetes, or builds the image.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.packaging_tools import ROOT, run

DEPLOY = ROOT / "deploy"
SCHEMA = json.loads(Path(__file__).with_name("mpijob_schema.json").read_text())
TRAINER_SCHEMA = json.loads(Path(__file__).with_name("trainer_schema.json").read_text())


@pytest.fixture
def mpijob() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())


@pytest.fixture
def trainer() -> dict[str, dict[str, Any]]:
    """Returns Kubeflow Trainer's manifests by kind."""
    manifests = [yaml.safe_load((DEPLOY / name).read_text()) for name in ("trainjob.yaml", "trainingruntime.yaml")]
    return {manifest["kind"]: manifest for manifest in manifests}


def test_deploy_files_are_short_and_named_in_the_docs():
    page = (ROOT / "docs" / "clusters.md").read_text()
    for path in DEPLOY.iterdir():
        assert f"deploy/{path.name}" in page
        assert len(path.read_text().splitlines()) <= 60


def test_batch_script_is_valid_bash():
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], check=True)


def test_mpijob_follows_the_operators_schema(mpijob):
    import jsonschema  # its import takes a second

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(mpijob, SCHEMA)
    wrong = copy.deepcopy(mpijob)
    wrong["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(wrong, SCHEMA)


def test_mpijob_uses_one_image_and_mounts_its_volumes(mpijob):
    pods = {name: replica["template"]["spec"] for name, replica in mpijob["spec"]["mpiReplicaSpecs"].items()}
    images = {container["image"] for pod in pods.values() for container in pod["containers"]}
    assert len(images) == 1
    assert f"-t {images.pop()} " in (DEPLOY / "Dockerfile").read_text()
    for pod in pods.values():
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        mounts = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
        assert volumes == mounts


def test_mpijob_launcher_starts_the_ranks_of_the_operators_hostfile(mpijob, tmp_path):
    name, workers = mpijob["metadata"]["name"], mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    hosts = [f"{name}-worker-{number}.{name}.default.svc" for number in range(workers)]
    slots = mpijob["spec"]["slotsPerWorker"]
    command = mpijob["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    check_launcher_starts_ranks(command, hosts, slots, tmp_path)


def check_launcher_starts_ranks(command: list[str], hosts: list[str], slots: int, tmp_path: Path) -> None:
    """Checks that, with the host file that the operator mounts, there are `slots` ranks on each of `hosts`."""
    (tmp_path / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts))
    program, *words = command
    assert program == "keras-ddl"
    words = [word.replace("/etc/mpi/", f"{tmp_path}/") for word in words]
    words.insert(words.index("run") + 1, "--dry-run")
    (tmp_path / "train.py").touch()
    shown = run(Path(sys.executable).with_name("keras-ddl"), *words, cwd=tmp_path)
    assert f"-np {slots * len(hosts)} " in shown
    assert f"--host {','.join(f'{host}:{slots}' for host in hosts)} " in shown
    assert shown.rstrip().endswith("train.py")


@pytest.mark.parametrize("kind", ["TrainJob", "ClusterTrainingRuntime"])
def test_kubeflow_trainer_manifests_follow_its_schemas(kind, trainer):
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(TRAINER_SCHEMA[kind])
    validator = jsonschema.Draft202012Validator(TRAINER_SCHEMA[kind])
    validator.validate(trainer[kind])
    wrong = copy.deepcopy(trainer[kind])
    if kind == "TrainJob":
        wrong["spec"]["trainer"]["numProcPerNode"] = "auto"  # accepted by v2.0
    else:
        wrong["spec"]["template"]["spec"]["replicatedJobs"][1]["dependsOn"][0]["status"] = "Running"
    assert len(list(validator.iter_errors(wrong))) == 1


def test_kubeflow_trainer_runtime_passes_the_job_to_its_launcher(trainer):
    """Checks what Trainer's MPI and JobSet plugins (v2.3.0) look for, and that the image is that of the other files."""
    job, runtime = trainer["TrainJob"]["spec"], trainer["ClusterTrainingRuntime"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # The launcher has as many pods as the policy has nodes; numNodes of a TrainJob applies to "node" only.
    assert runtime["spec"]["mlPolicy"]["numNodes"] == 1 and not runtime["spec"]["mlPolicy"]["mpi"]["runLauncherAsNode"]
    node, launcher = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (node["name"], launcher["name"]) == ("node", "launcher")
    assert launcher["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert "metadata" not in node["template"] and launcher["dependsOn"] == [{"name": "node", "status": "Ready"}]
    pods = [each["template"]["spec"]["template"]["spec"] for each in (node, launcher)]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["name"] == "node" and f"-t {container['image']} " in (DEPLOY / "Dockerfile").read_text()
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        assert volumes == {mount["name"] for mount in container.get("volumeMounts", ())}
    # The trainer sets these itself, and refuses them in a TrainJob.
    assert not {each["name"] for each in job["trainer"].get("env", ())} & {"OMPI_MCA_orte_keep_fqdn_hostnames"}


def test_trainjob_starts_the_ranks_of_the_trainers_hostfile(trainer, tmp_path):
    name, job = trainer["TrainJob"]["metadata"]["name"], trainer["TrainJob"]["spec"]["trainer"]
    hosts = [f"{name}-node-0-{number}.{name}" for number in range(job["numNodes"])]
    check_launcher_starts_ranks(job["command"], hosts, job["numProcPerNode"], tmp_path)

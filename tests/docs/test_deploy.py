"""The files in deploy/: shown in the docs as they are, and of the form that their readers expect.

tests/slurm runs the batch script. Nothing here runs on Kubernetes, or builds the image.
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


@pytest.fixture
def mpijob() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpijob.yaml", "Dockerfile"])
def test_deploy_files_stand_in_the_docs_as_they_are(name):
    page = (ROOT / "docs" / "clusters.md").read_text()
    text = (DEPLOY / name).read_text()
    assert f"`deploy/{name}`" in page
    assert f"\n{text}```\n" in page
    assert len(text.splitlines()) <= 60


def test_batch_script_is_one_that_bash_reads():
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], check=True)


def test_mpijob_follows_the_schema_of_the_operator(mpijob):
    import jsonschema  # which takes a second to import

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(mpijob, SCHEMA)
    wrong = copy.deepcopy(mpijob)
    wrong["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(wrong, SCHEMA)


def test_mpijob_names_one_image_and_mounts_what_it_has(mpijob):
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
    (tmp_path / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts))
    program, *words = mpijob["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert program == "keras-ddl"
    words = [word.replace("/etc/mpi/", f"{tmp_path}/") for word in words]
    words.insert(words.index("run") + 1, "--dry-run")
    (tmp_path / "train.py").touch()
    shown = run(Path(sys.executable).with_name("keras-ddl"), *words, cwd=tmp_path)
    assert f"-np {slots * workers} " in shown
    assert f"--host {','.join(f'{host}:{slots}' for host in hosts)} " in shown
    assert shown.rstrip().endswith("train.py")

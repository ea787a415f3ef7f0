import pytest

from keras_ddl.topology import launcher


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ("Open MPI", 1, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, ("MPICH or Intel MPI", 2, 3)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, ("Slurm's srun", 1, 2)),
        ({"PMIX_RANK": "5"}, ("PMIx", 5, None)),
        ({"PMIX_RANK": "5", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, ("Slurm's srun", 5, 8)),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "9"},
            ("Open MPI", 0, 2),
        ),
    ],
)
def test_launcher_is_recognised_by_its_variables(environ, expected):
    found = launcher.find_launcher(environ)
    assert (found and (found.name, found.rank, found.size)) == expected


def test_launcher_ignores_the_script_of_sbatch_and_the_shell_of_salloc():
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert launcher.find_launcher(environ) is None
    assert launcher.allocation_size(environ) == 4


def test_allocation_size_is_none_outside_of_slurm():
    assert launcher.allocation_size({"SLURM_NTASKS": "4"}) is None


def test_host_key_is_equal_within_a_host_and_starts_with_its_name():
    import socket

    assert launcher.host_key() == launcher.host_key()
    assert launcher.host_key().startswith(socket.gethostname())


def test_mode_comes_from_ddl_options_unless_overridden(monkeypatch):
    monkeypatch.delenv("KERAS_DDL_MODE", raising=False)
    monkeypatch.delenv("DDL_OPTIONS", raising=False)
    assert launcher.chosen_mode() == "p"
    monkeypatch.setenv("DDL_OPTIONS", "-foo 1 -mode x:2x2")
    assert launcher.chosen_mode() == "x:2x2"
    monkeypatch.setenv("DDL_OPTIONS", "-mode r -dump_iter 5")  # `ddl.init` reads it the same way
    assert launcher.chosen_mode() == "p"
    monkeypatch.setenv("KERAS_DDL_MODE", "x:4x1")
    assert launcher.chosen_mode() == "x:4x1"

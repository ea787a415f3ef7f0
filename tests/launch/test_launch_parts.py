"""The parts of the launcher that need no processes: command lines, environments, connections, verdicts."""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keras_ddl.errors import ConfigError, LaunchError
from keras_ddl.launch import address as address_module
from keras_ddl.launch import job
from keras_ddl.launch.address import Address
from keras_ddl.launch.hosts import Host, parse_hosts
from keras_ddl.launch.job import JobResult
from keras_ddl.launch.mpi import mpirun, native_mpi
from keras_ddl.launch.mpi.mpirun import HYDRA, OPEN_MPI, Mpirun
from keras_ddl.launch.outcome import RESTART_STATUS, RankOutcome, explain, first_failure
from keras_ddl.launch.rank.job_folder import remove_job_folder
from keras_ddl.launch.rank.rank_environment import merge, rank_and_size, tune_malloc
from keras_ddl.launch.stdin import StdinForwarder
from keras_ddl.link.channel import Channel
from keras_ddl.link.kinds import Kind
from launch.launching import write_script


def fake_mpirun(folder: Path, says: str) -> str:
    return write_script(folder / "mpirun", f"echo '{says}'")


@pytest.mark.parametrize(
    ("says", "family"),
    [
        ("mpirun (Open MPI) 5.0.11", OPEN_MPI),
        ("HYDRA build details:\n    Version:      5.0.2", HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", HYDRA),
    ],
)
def test_mpirun_family_is_what_it_says(tmp_path: Path, says: str, family: str):
    assert mpirun.find(fake_mpirun(tmp_path, says)).family == family


def test_mpirun_is_taken_from_the_setting_and_then_from_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = fake_mpirun(tmp_path, "HYDRA build details:")
    monkeypatch.setattr(native_mpi, "describe", lambda: {"site_launcher": path})
    assert mpirun.find() == Mpirun(path, HYDRA, "HYDRA build details:")
    monkeypatch.setattr(native_mpi, "describe", lambda: {"site_launcher": str(tmp_path / "gone")})
    assert mpirun.find().path != path
    monkeypatch.setenv("KERAS_DDL_MPIRUN", path)
    assert mpirun.find().path == path
    with pytest.raises(LaunchError, match="--mpirun must be the path"):
        mpirun.find(str(tmp_path / "other"))


def test_native_mpi_is_described_without_loading_it():
    found = native_mpi.describe()
    assert found.get("problem") or (found["family"] and Path(found["path"]).exists())
    assert "libmpi" not in Path("/proc/self/maps").read_text()


def test_job_has_a_rank_for_each_task_of_slurm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert job.make(["p"], num_ranks=None).num_ranks == 3
    assert job.make(["p"], num_ranks=2).num_ranks == 2
    assert job.make(["p"], num_ranks=None, hosts="a:4").num_ranks == 4
    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(ConfigError, match="SLURM_NTASKS is not set"):
        job.make(["p"], num_ranks=None)


def test_job_that_mpirun_starts_cannot_go_on_and_says_so(tmp_path: Path):
    path = fake_mpirun(tmp_path, "mpirun (Open MPI) 5.0.11")
    why = job.make(["p"], num_ranks=2, min_ranks=1, mpirun=path).cannot_continue_reason
    assert "starts the ranks, and ends all of them when one is lost" in why and "leave out --mpirun" in why
    assert job.make(["p"], num_ranks=2, min_ranks=1).cannot_continue_reason is None


def test_mpirun_command_of_open_mpi(monkeypatch: pytest.MonkeyPatch):
    found = Mpirun("/m", OPEN_MPI, "")
    monkeypatch.setattr(mpirun, "_local_slots", lambda: 2)
    base = ["--bind-to", "none", "--map-by", "slot"]
    assert mpirun.command(found, ["p"], num_ranks=2) == ["/m", "-np", "2", *base, "p"]
    assert mpirun.command(found, ["p"], num_ranks=3) == ["/m", "-np", "3", *base, "--oversubscribe", "p"]
    assert mpirun.command(found, ["p"], num_ranks=3, allocation=True) == ["/m", "-np", "3", *base, "p"]
    line = mpirun.command(
        found, ["p"], num_ranks=3, hosts=[Host("a", 2), Host("b", 1)], forward=["V"], extra=["--mca", "x", "y"]
    )
    assert line == ["/m", "-np", "3", *base, "--host", "a:2,b:1", "-x", "V", "--mca", "x", "y", "p"]


def test_mpirun_command_of_hydra():
    found = Mpirun("/m", HYDRA, "")
    line = mpirun.command(found, ["p", "-q"], num_ranks=3, hosts=[Host("a", 2), Host("b", 1)], forward=["V", "W"])
    assert line == ["/m", "-n", "3", "-hosts", "a:2,b:1", "-genvlist", "V,W", "p", "-q"]


def test_mpirun_environment_hides_an_outer_job(monkeypatch: pytest.MonkeyPatch):
    outer = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_RANK": "1", "HYDI_CONTROL_FD": "7"}
    outer |= {"KERAS_DDL_RANK_PROCESS": "99"}
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 1000)
    inner = mpirun.environment({**outer, "OMPI_MCA_btl": "tcp,self", "PATH": "/bin", "HOME": "/h"})
    assert inner == {"OMPI_MCA_btl": "tcp,self", "PATH": "/bin", "HOME": "/h", "I_MPI_PIN": "0"}


def test_a_user_without_a_home_has_none_that_others_can_fill(monkeypatch: pytest.MonkeyPatch):
    # Open MPI loads what $HOME/.openmpi/mca-params.conf names, and Python runs what is in $HOME/.local.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry for this user
    for folder in [home := Path(mpirun.environment({})["HOME"]), *home.parents]:
        if folder.exists():
            assert folder == Path("/")
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 0)
    assert mpirun.environment({})["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_parse_hosts_reads_names_and_numbers():
    assert parse_hosts("h0:2, node-1.site:16,h2") == (Host("h0", 2), Host("node-1.site", 16), Host("h2", 1))


@pytest.mark.parametrize("text", ["h0:", "h0:0", "h0:-1", ":2", "h0,,h1", "-x:1", "h 0", "h0:2:3", "h0,h0"])
def test_parse_hosts_refuses(text: str):
    with pytest.raises(ConfigError, match="hosts must"):
        parse_hosts(text)


def test_rank_environment_prefers_the_launcher_but_for_mpi_and_the_host():
    own = {"OMPI_COMM_WORLD_RANK": "1", "HOSTNAME": "there", "PATH": "/mpi/bin:/usr/bin", "PYTHONPATH": "/of/wrapper"}
    own |= {"KERAS_DDL_LAUNCHER": "secret", "ONLY_THERE": "x", "KERAS_DDL_RACK": "of there"}
    wanted = {
        "OMPI_COMM_WORLD_RANK": "9",
        "HOSTNAME": "here",
        "KERAS_DDL_RACK": "of here",
        "PATH": "/usr/bin:/venv/bin",
        "SET": "1",
    }
    assert merge(own, wanted, same_host=False) == {
        "OMPI_COMM_WORLD_RANK": "1",
        "HOSTNAME": "there",
        "PATH": "/mpi/bin:/usr/bin:/venv/bin",
        "ONLY_THERE": "x",
        "KERAS_DDL_RACK": "of there",
        "SET": "1",
    }
    assert merge(own, wanted, same_host=True)["HOSTNAME"] == "here"


def test_rank_and_size_outside_of_mpirun_is_a_clear_error():
    assert rank_and_size({"PMI_RANK": "3", "PMI_SIZE": "4"}) == (3, 4)
    with pytest.raises(LaunchError, match="must be started by mpirun"):
        rank_and_size({})


def test_address_survives_the_environment(tmp_path: Path):
    for path in (None, tmp_path / ("folder@a:1," + "d" * 120) / "launcher"):
        if path is not None:
            path.parent.mkdir()
        listener, address = address_module.listen(path)
        address_module.connect(address).close()
        listener.close()
        assert Address.parse(str(address)) == address
    assert address.token not in repr(address)
    with pytest.raises(LaunchError, match="KERAS_DDL_LAUNCHER must be"):
        Address.parse("nonsense")


def test_connect_to_nobody_is_a_clear_error():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = Address("00", socket.gethostname(), ("127.0.0.1",), unused.getsockname()[1])
    with pytest.raises(LaunchError, match="must be able to open a TCP connection to the launcher"):
        address_module.connect(address, timeout=0.3)


def test_stdin_is_read_only_as_far_as_rank_0_takes_it():
    ours, theirs = (Channel(each, None) for each in socket.socketpair())
    with Path("/dev/zero").open("rb") as endless:
        stdin = StdinForwarder(endless.fileno())
        rounds = 0
        while stdin.readable():
            stdin.forward(ours)
            rounds += 1
            assert rounds < 100
        frames: list[tuple[Kind, bytes]] = []
        while len(frames) < rounds:
            frames += theirs.read()
        assert 0 < sum(len(payload) for _, payload in frames) <= 1 << 16
        stdin.taken(10)
        assert stdin.readable()
    assert not StdinForwarder(None).readable()


def missing(rank: int, at: float, *others: int, text: str = "RankLostError: 2 is gone", **rest) -> RankOutcome:
    """A rank whose report says that others are gone."""
    report = {"type": "DistBackendError", "summary": text, "traceback": f"Traceback\n{text}", "lost": {"ranks": others}}
    return RankOutcome(rank, f"h{rank}", status=rest.pop("status", 1), report=report, failed_at=at, **rest)


def failed(rank: int, at: float, error: str = "", **rest) -> RankOutcome:
    traceback = f"Traceback (most recent call last):\n  File x\n{error}\n" if error else ""
    return RankOutcome(rank, f"h{rank}", status=rest.pop("status", 1), traceback=traceback, failed_at=at, **rest)


@pytest.mark.parametrize(
    ("status", "stopped_by", "shown"),
    [
        (3, None, 3),
        (-9, None, 137),
        (-15, None, 143),
        (0, None, 1),  # in the middle of the job: others have missed it
        (None, None, 1),
        (0, "mpirun", 1),
        (-15, "the launcher", 1),
    ],
)
def test_exit_status_is_a_shells_and_never_that_of_success(status: int | None, stopped_by: str | None, shown: int):
    assert RankOutcome(0, status=status, stopped_by=stopped_by).exit_status == shown


def test_first_failure_is_the_earliest_cause():
    done = RankOutcome(0, "h0", status=0)
    lost = missing(1, 1.0)
    late, early = failed(2, 3.0, "ValueError: late"), failed(3, 2.0, "KeyError: 'early'")
    stopped = RankOutcome(4, "h4", status=-15, stopped_by="the launcher", failed_at=0.5)
    assert first_failure([done, lost, late, early, stopped]) is early
    assert first_failure([done, lost, stopped]) is lost
    assert first_failure([done, stopped]) is None
    assert first_failure([failed(0, 1.0, status=0), failed(1, 2.0, status=0)]) is None
    killed = RankOutcome(5, "h5", status=-9, failed_at=1.5)
    assert first_failure([lost, early, killed]) is killed


STOPPED_LEAVER = RankOutcome(1, "h1", status=-15, stopped_by="mpirun", failed_at=9.0)
ALL_BUT_ONE_MISS_IT = [missing(0, 5.0, 2), failed(1, 5.5, status=0), failed(2, 9.0, status=0)]


@pytest.mark.parametrize(
    ("outcomes", "first"),
    [
        (ALL_BUT_ONE_MISS_IT, 2),
        ([*ALL_BUT_ONE_MISS_IT, failed(3, 8.0, "ValueError: x")], 3),
        ([missing(0, 2.0, 1), STOPPED_LEAVER, missing(2, 1.0, 1)], 1),  # ended before it could say that it left
        ([missing(0, 1.0, 1), missing(1, 2.0, 2), failed(2, 3.0, status=-9)], 2),
        ([missing(0, 1.0, 1), missing(1, 2.0, 0)], 0),
        ([missing(0, 1.0, 7)], 0),  # of rank 7 nothing is known
    ],
)
def test_first_failure_is_the_rank_that_the_others_miss(outcomes: list[RankOutcome], first: int):
    assert first_failure(outcomes).rank == first


def test_first_failure_is_not_told_by_the_name_of_an_error():
    # The program's own, which it raises as it likes: no collective has failed.
    own = failed(1, 1.0, "keras_ddl.errors.RankLostError: rank 0 has left")
    assert first_failure([failed(0, 2.0, "ValueError: later"), own]) is own


def test_first_failure_may_have_been_stopped_after_its_error():
    # MPI_Abort: mpirun ends the rank that called it as well.
    aborted = failed(0, 1.0, "ValueError: x", stopped_by="mpirun", status=-15)
    other = failed(1, 1.1, "KeyboardInterrupt", stopped_by="the launcher")
    assert first_failure([other, aborted]) is aborted
    assert aborted.exit_status == 1


def test_explain_says_which_ranks_failed_alike_and_what_others_had_of_their_own():
    quick, slow = failed(1, 1.0, "ValueError: bad (rank 1)"), failed(0, 1.5, "ValueError: bad (rank 0)")
    text = explain([slow, quick], first_failure([slow, quick]))
    first = "and the job was ended (exit status 1). Rank 0 on host h0:"
    assert text.splitlines()[0] == f"keras-ddl: all 2 ranks failed alike, {first}" and text.count("bad") == 1, text
    other = failed(2, 1.7, "OSError: disk")
    stopped = RankOutcome(3, "h3", status=-15, stopped_by="the launcher")
    text = explain([slow, quick, other, stopped], first_failure([slow, quick, other, stopped]))
    lines = text.splitlines()
    assert lines[:2] == [f"keras-ddl: ranks 0-1 failed alike, {first}", "keras-ddl: rank 2: OSError: disk"], text
    assert len(lines) == 5 and lines[-1] == "ValueError: bad (rank 0)", text


def test_explain_names_the_rank_whose_error_all_have_raised():
    own = failed(2, 5.0, "KeyError: 'x'")
    told = [failed(rank, 1.0, "KeyError: 'rank 2: x'") for rank in (0, 1)]
    for each in told:
        each.report = {"summary": "KeyError: 'rank 2: x'", "failed_rank": 2, "failed_alike": False}
    assert first_failure([*told, own]) is own
    assert explain([*told, own], own).startswith("keras-ddl: rank 2 on host h2 failed first, and the job was ended (")
    told[1].report["failed_alike"] = True
    assert explain([*told, own], own).startswith("keras-ddl: ranks 1-2 failed alike, and the job was ended (")


def test_explain_tells_why_the_others_end_if_the_report_says_so_whatever_its_words():
    killed, other = failed(1, 1.0, status=-9), missing(0, 2.0, 1, text="RankLostError: in other words")
    assert "in other words" not in explain([other, killed], killed)
    other.report["ends_others"] = True
    assert "keras-ddl: rank 0: RankLostError: in other words" in explain([other, killed], killed).splitlines()


def test_explain_does_not_blame_the_rank_that_misses_another():
    first = missing(2, 1.0)
    leaver = RankOutcome(1, "h1", status=-15, stopped_by="mpirun")
    text = explain([leaver, first], first)
    assert "rank 2 on host h2 was the first to report a lost rank" in text and "failed first" not in text
    text = explain([leaver, missing(2, 1.0, 1)], leaver)
    assert "rank 1 on host h1 failed first, and the job was ended: left while others waited for it (sys.exit" in text


def test_explain_shows_what_mpirun_said_when_nothing_else_is_known():
    first = failed(0, 1.0, status=-6)
    ruler = "-" * 74
    boilerplate = f"{ruler}\nMPI_ABORT was invoked on rank 0\n{ruler}\n"
    text = explain([first], first, f"{boilerplate}{ruler}\nPML add procs failed\n{ruler}\n")
    assert text.startswith("keras-ddl: rank 0") and "mpirun said:\n    PML add procs failed\n" in text
    assert "MPI_ABORT" not in text and "mpirun said" not in explain([first], first, boilerplate)
    assert "killed by SIGABRT" in text


def test_outcome_error_is_the_last_line_of_the_traceback():
    text = "Traceback (most recent call last):\n  File x\nValueError: a: b\n  more\n\nAbort(1) on node 0 (rank 0)\n"
    assert RankOutcome(0, status=1, traceback=text).error == "ValueError: a: b"
    report = {"type": "KeyError", "traceback": "", "summary": "KeyError: 'x'"}
    assert RankOutcome(0, status=1, report=json.loads(json.dumps(report))).error == "KeyError: 'x'"


@pytest.mark.parametrize(
    "before, ranks, after",
    [
        (None, 100, "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"),
        ("", 2, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", 100, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", 2, "glibc.malloc.hugetlb=0"),
    ],
)
def test_malloc_keeps_its_memory_in_huge_pages_unless_the_user_says_how(before, ranks, after, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    environment = {} if before is None else {"GLIBC_TUNABLES": before}
    tune_malloc(environment, ranks)
    assert environment["GLIBC_TUNABLES"] == after


def test_explain_ends_with_the_newest_checkpoint_and_how_to_go_on_from_it():
    def with_checkpoint(rank: int, step: int, resume: bool) -> RankOutcome:
        return RankOutcome(rank, status=0, checkpoint={"path": f"/c/ckpt-{step:08d}", "step": step, "resume": resume})

    first = failed(2, 1.0, "ValueError: bad")
    older = with_checkpoint(0, 12, True)
    *_, error, hint = explain([older, first], first).splitlines()
    assert error == "ValueError: bad"
    assert hint.startswith("keras-ddl: The last checkpoint is /c/ckpt-00000012. To continue from it, start the same")
    assert "resume=True" not in hint and "--restarts N does this" in hint
    text = explain([older, with_checkpoint(1, 15, False), first], first)
    assert "/c/ckpt-00000015" in text and "with resume=True in callbacks.Checkpoint. With it, --restarts N" in text
    assert "/c/ckpt-00000012" not in text


def test_a_job_asks_to_be_started_again_only_if_all_of_its_ranks_do():
    result = JobResult([RankOutcome(0, status=RESTART_STATUS), RankOutcome(1, status=1)])
    assert result.exit_status != 0 and not result.asks_to_restart


def test_ranks_that_end_together_remove_the_folder_of_their_job_together(tmp_path: Path):
    folder = tmp_path / "keras_ddl-job"
    with ThreadPoolExecutor(4) as ranks:
        for _ in range(100):
            for name in ("keras_ddl-1", "keras_ddl-2"):
                (folder / name).mkdir(parents=True)
            for removal in [ranks.submit(remove_job_folder, folder, 0.0) for _ in range(4)]:
                removal.result()
            assert not folder.exists()


def test_the_folder_of_a_wrapper_that_was_killed_is_removed_by_another(tmp_path: Path):
    folder = tmp_path / "keras_ddl-job"
    make = "import sys; from pathlib import Path; from keras_ddl.launch.rank import job_folder as f\n"
    make += "f.make(Path(sys.argv[1])); f.make_for_rank(Path(sys.argv[1]), 3); print('made', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", make, folder], stdin=-1, stdout=-1) as wrapper:
        assert wrapper.stdout.readline() == b"made\n"
        remove_job_folder(folder, 0.0)
        assert (folder / "rank-3").exists()
        wrapper.kill()
        wrapper.wait()
    remove_job_folder(folder, 0.0)
    assert not folder.exists()


@pytest.mark.parametrize(("chosen", "expected"), [(None, "0"), ("", "0"), ("7", "7"), ("random", r"\d+")])
def test_all_ranks_of_a_job_list_sets_in_one_order(monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    given = {} if chosen is None else {"PYTHONHASHSEED": chosen}
    one, other = (job.make(["true"], num_ranks=2, env=given).environment["PYTHONHASHSEED"] for _ in range(2))
    assert re.fullmatch(expected, one) and (one != other) == (chosen == "random")
    if chosen:
        monkeypatch.setenv("PYTHONHASHSEED", chosen)
        assert re.fullmatch(expected, job.make(["true"], num_ranks=2).environment["PYTHONHASHSEED"])

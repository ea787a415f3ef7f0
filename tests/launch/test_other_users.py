"""Other users of this machine.

They make directories and files ahead of a job, under every name that they can see or guess. They find no port of a job
whose ranks are all on one host, and no socket to open.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from link.wrappers import served

from keras_ddl.errors import ConfigError
from keras_ddl.files import private
from keras_ddl.launch.rank import job_folder
from keras_ddl.launch.rank.program_link import WrapperLink
from keras_ddl.launch.starters import host_ranks
from keras_ddl.link.handshake import sign
from keras_ddl.link.kinds import Kind
from keras_ddl.link.program import SOCKET
from launch.launching import (
    AS_NOBODY,
    LIMIT_SECONDS,
    STARTERS,
    environment,
    processes,
    run,
    start_program,
    write_program,
)
from launch.test_connection import waiting_wrapper
from launch.test_run_hosts import can_make_hosts, needs_hosts, write_agent

pytestmark = pytest.mark.parallel
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextlib.contextmanager
def as_stranger(program: str, *words: object) -> Iterator[str]:
    """Runs Python as another user; begins when it has said something: gives that line."""
    command = [*AS_NOBODY, sys.executable, "-I", "-S", "-c", program, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            line = stranger.stdout.readline()
            assert line
            yield line
        finally:
            stranger.kill()


def shared(folder: Path) -> Path:
    """A new directory that is open for all, as /tmp is."""
    for above in [each for each in folder.parents if each.stat().st_uid == os.geteuid() and each != Path("/")]:
        above.chmod(above.stat().st_mode | 0o055)
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_the_name_of_a_jobs_directory_on_one_host_does_not_tell_that_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set()
    for host in ("h0", "h1"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names |= {job_folder.on_this_host(secret).name for secret in ("1" * 32, "2" * 32)}
    assert len(names) == 4 and not any(secret * 32 in name for name in names for secret in "12")


# Keeps every command line of the machine, and every word of files that others may read in the hosts' directories.
READER = """
import os, sys, time
print("ready", flush=True)
seen = set()
while True:
    texts = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                texts.append(open(f"/proc/{pid}/{name}", errors="replace").read())
            except OSError:
                pass
    for host in sys.argv[2:]:
        for folder, _, names in os.walk(host):
            for name in names:
                try:
                    if os.path.isfile(f"{folder}/{name}"):
                        texts.append(open(f"{folder}/{name}", errors="replace").read(1 << 20))
                except OSError:
                    pass
    with open(sys.argv[1], "a") as file:
        for text in set(texts) - seen:
            seen.add(text)
            print(repr(text), file=file)
    time.sleep(0.005)
"""
TELLS = """
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
Path(f"environment-{RANK}").write_text(repr(dict(os.environ)))
wrapper = Path(f"/proc/{os.getppid()}/environ").read_text().split(chr(0))
Path(f"wrapper-{RANK}").write_text(next(each for each in wrapper if each.startswith("KERAS_DDL_LAUNCHER=")))
time.sleep(0.3)
"""


@needs_root
@needs_hosts
@pytest.mark.parametrize("starter", ["remote_ranks", pytest.param("mpirun", marks=pytest.mark.long)])
def test_no_secret_is_on_a_command_line_or_in_a_file_for_all(starter: str, tmp_path: Path) -> None:
    given = {"BY_NAME": "secret-1b7c", "BY_FILE": "secret-88fe", "INHERITED": "secret-d00d"}
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text(f"BY_FILE={given['BY_FILE']}\n")
    agent = write_agent(tmp_path, 'export TMPDIR="${TMPDIR%/*}/$host"')
    hosts = [shared(tmp_path / name) for name in ("tmp", "h0", "h1")]
    options = ["-np", "2:"] if starter == "remote_ranks" else ["--mpi-arg", f"--prtemca plm_ssh_agent {agent}"]
    options += ["--env", "BY_NAME", "--env-file", str(secrets)]
    command = ["run", "--hosts", "h0:1,h1:1", *options, "python", write_program(tmp_path, TELLS)]
    env = {"KERAS_DDL_SSH": agent} | {name: given[name] for name in ("BY_NAME", "INHERITED")}
    seen = shared(tmp_path / "seen") / "texts"
    with as_stranger(READER, seen, *hosts):
        ended = run(command, tmp_path, env=env)
    assert ended.status == 0, ended
    for rank in range(2):
        assert given.items() <= ast.literal_eval((tmp_path / f"environment-{rank}").read_text()).items()
    text = seen.read_text()
    assert "keras_ddl.launch" in text, "the reader saw nothing"
    token = (tmp_path / "wrapper-1").read_text().partition("=")[2].partition("@")[0]
    assert len(token) == 64
    assert [each for each in (*given.values(), token) if each in text] == []


def plant(kind: str, path: Path, elsewhere: Path) -> None:
    """Makes something in place of the directory `path`."""
    elsewhere.mkdir(mode=0o700, exist_ok=True)
    match kind:
        case "directory for all":
            path.mkdir()
            path.chmod(0o777)
        case "directory that others may enter":
            path.mkdir(mode=0o711)
        case "link":
            path.symlink_to(elsewhere)
        case "file":
            path.touch()
        case "directory of another user":
            path.mkdir(mode=0o700)
            os.chown(path, 65534, 65534)


KINDS = ["directory for all", "directory that others may enter", "link", "file"]


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("directory of another user", marks=needs_root)])
def test_what_is_planted_is_not_taken(kind: str, tmp_path: Path) -> None:
    place, elsewhere = shared(tmp_path / "tmp"), tmp_path / "elsewhere"
    plant(kind, place / "name", elsewhere)
    before = (place / "name").lstat()
    for is_new in (False, True):
        with pytest.raises((ConfigError, FileExistsError) if is_new else ConfigError):
            private.private_directory(place / "name", is_new=is_new)
    assert (place / "name").lstat() == before and list(elsewhere.iterdir()) == []
    (tmp_path / "link").symlink_to(place)
    for _ in range(2):  # is made once, and taken again
        path = private.private_directory(tmp_path / "link" / "other")
        assert path == place / "other" and stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "file").touch()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("mode", "owner", "is_safe"),
    [(0o1777, 0, True), (0o755, 0, True), (0o777, 0, False), (0o757, 0, False)]
    + [pytest.param(*each, marks=needs_root) for each in [(0o700, 65534, False), (0o1777, 65534, False)]],
)
def test_a_directory_above_must_not_let_others_rename(
    mode: int, owner: int, is_safe: bool, depth: int, tmp_path: Path
) -> None:
    above = tmp_path / "above"
    below = above.joinpath(*["below"] * (depth - 1))
    below.mkdir(parents=True)
    above.chmod(mode)
    if owner:
        os.chown(above, owner, owner)
    if is_safe:
        assert private.private_directory(below / "name").is_dir()
    else:
        with pytest.raises(ConfigError, match="can rename (its )?entries"):
            private.private_directory(below / "name")
        assert not (below / "name").exists()


@needs_root
def test_a_group_that_may_rename_is_no_stranger_only_if_it_is_the_users_own(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o775)
    private.private_directory(above / "one")
    os.chown(above, -1, 65534)
    with pytest.raises(ConfigError, match="without the sticky bit"):
        private.private_directory(above / "two")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """The working directory of a job, which must be as it is in the end."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "thesis").write_text("everything")
    yield folder
    assert (folder / "thesis").read_text() == "everything" and [each.name for each in folder.iterdir()] == ["thesis"]


@pytest.mark.parametrize(("which", "kind"), [("job", "directory for all"), ("kept", "link")])
def test_a_wrapper_whose_directory_is_planted_touches_nothing(
    kind: str, which: str, work: Path, tmp_path: Path
) -> None:
    place = shared(tmp_path / "tmp")
    secrets_of_job = {"job": "1" * 32, "kept": "2" * 32}
    path = place / job_folder.on_this_host(secrets_of_job[which]).name
    plant(kind, path, tmp_path / "elsewhere")
    # In a room of its own: a wrapper that confuses its directories may not end other processes.
    before = ["unshare", "--pid", "--fork", "--mount-proc"] * can_make_hosts()
    waiting = waiting_wrapper(place, "touch", "made", cwd=work, before=before)
    with subprocess.Popen(["sleep", "600"], cwd=work) as bystander:
        try:
            with waiting as (wrapper, channel, hello, token):
                welcome = {"host": "", "environment": {}, "directory": str(work), "terminal": {}, "stdin": False}
                welcome |= {"regroups": False, "of_job": {}, **secrets_of_job}
                channel.send(Kind.WELCOME, sign(token, "listener", bytes.fromhex(hello["nonce"]), welcome))
                channel.send(Kind.START)
                said, _ = wrapper.communicate(timeout=LIMIT_SECONDS)
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert wrapper.returncode == 1 and str(path) in said and "Traceback" not in said, said
    assert [each.name for each in place.iterdir()] == [path.name]


@pytest.mark.parametrize(("which", "kind"), [("", "file"), (job_folder.SOCKETS, "directory for all")])
def test_host_ranks_start_nothing_in_a_planted_directory(kind: str, which: str, work: Path, tmp_path: Path) -> None:
    place = shared(tmp_path / "tmp")
    folder = place / job_folder.on_this_host("1" * 32).name
    if which:
        folder.mkdir(mode=0o700)
    plant(kind, folder / which, tmp_path / "elsewhere")
    message = {"launcher": "0@h@127.0.0.1:1", "job": "1" * 32, "first": 0, "local_ranks": [0], "local_size": 1}
    message |= {"size": 1, "hosts": 2, "program": ["touch", "made"]}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "keras_ddl.launch.starters.host_ranks", "--from-stdin"],
        input=json.dumps(message) + "\n",
        cwd=work,
        env=environment("-", place, None),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 1 and "keras-ddl: ConfigError: " in done.stdout and not done.stderr, done
    assert host_ranks.READY.decode() not in done.stdout


@needs_root
def test_a_wrapper_hears_no_other_user(tmp_path: Path) -> None:
    for above in (tmp_path, *list(tmp_path.parents)[:2]):
        above.chmod(above.stat().st_mode | 0o055)
    link = WrapperLink(tmp_path, {})
    path = tmp_path / SOCKET
    path.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(str(path))
        assert served(link) == [] and len(list(link.sources(list))) == 2
        says = f"import socket; s = socket.socket(1); s.connect({str(path)!r}); print('sent', flush=True); s.recv(1)"
        with as_stranger(says):
            assert served(link) == [] and len(list(link.sources(list))) == 2
        own.sendall(b"\x16" + (2).to_bytes(8) + b"{}")
        assert served(link) == [(Kind.QUESTION, b"{}")]


# ---- ports and sockets -----------------------------------------------------------------------------------------------

# Opens every port of its arguments, says nothing, and stays; then tries the UNIX sockets.
CALLER = """
import os, socket, sys, time
held = []
for port in map(int, sys.argv[2:]):
    held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
opened = []
for folder, _, names in os.walk(sys.argv[1], onerror=lambda error: None):
    for name in names:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                socket.socket(socket.AF_UNIX, kind).connect(os.path.join(folder, name))
                opened.append(name)
            except OSError:
                pass
print("connected", len(held), opened, flush=True)
time.sleep(600)
"""
MEETS = """
import keras_ddl
keras_ddl.init()
keras_ddl.barrier()
here("up")
while not Path("go").exists(): time.sleep(0.02)
keras_ddl.barrier()
print("fine", flush=True)
"""


def listened_to(pids: list[int]) -> Iterator[int]:
    """The ports that these processes listen to by TCP or UDP."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink()))
            except OSError:
                continue
            if found:
                sockets.add(found[1])
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in sockets and (state == "0A" or protocol.startswith("udp")):
                yield int(local.rpartition(":")[2], 16)


@needs_root
@pytest.mark.parametrize("env", STARTERS)
def test_a_job_on_one_host_listens_on_no_port_and_another_user_cannot_hold_it_up(env: dict[str, str], tmp_path: Path):
    # Open for others as /tmp is, but for what the job itself protects.
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    job = start_program(tmp_path, MEETS, env=env)
    ours = [pid for pid, line in processes(job.mark).items() if not re.search(r"prterun|^\S*mpirun", line)]
    with as_stranger(CALLER, job.tmp, *listened_to(ours)) as line:
        (tmp_path / "go").touch()
        ended = job.finish()
    assert ended.status == 0 and sorted(ended.out.splitlines()) == ["[1] fine", "fine"], ended
    assert line == "connected 0 []\n"

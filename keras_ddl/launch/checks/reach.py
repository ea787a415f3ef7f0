"""While mpirun starts, checks whether hosts answer on their ssh port: ssh waits minutes for a host that is down."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from keras_ddl.launch.checks.finding import Finding, Severity
from keras_ddl.launch.hosts import Host

_SECONDS = 5.0
# Fragments of settings that make mpirun reach hosts other than by the ssh in PATH.
_OTHER_WAYS = ("plm", "launcher", "bootstrap", "rsh")


def by_ssh(mpi_args: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether mpirun probably starts its daemons with the ssh in PATH."""
    variables = [name.lower() for name in environ if name.startswith(("OMPI_MCA_", "PRTE_MCA_", "HYDRA_", "I_MPI_"))]
    words = [*map(str.lower, mpi_args), *variables]
    return not any(way in word for word in words for way in _OTHER_WAYS) and shutil.which("ssh") is not None


class Reach:
    """Connects to each host once, in threads that the constructor starts."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._findings: dict[str, Finding] = {}
        here = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
        self._names = [host.name for host in hosts if host.name not in here]
        self._threads = [
            threading.Thread(target=self._check, args=(name,), name="keras_ddl-reach", daemon=True)
            for name in self._names
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Waits for the checks, but only a few seconds."""
        for thread in self._threads:
            thread.join(2 * _SECONDS)

    def findings(self) -> dict[str, Finding]:
        """Returns the findings so far, in the order of the hosts: name of an unreachable host -> reason."""
        found = dict(self._findings)
        return {name: found[name] for name in self._names if name in found}

    def _check(self, name: str) -> None:
        where = ssh_address(name)
        if where is None:
            return
        try:
            socket.create_connection(where, timeout=_SECONDS).close()
            return
        except socket.gaierror as error:
            problem, remedy = (
                f"its name cannot be resolved ({error.strerror})",
                "Correct the name, or add it to the DNS.",
            )
        except ConnectionRefusedError:
            problem, remedy = f"nothing listens on its port {where[1]}", "Start sshd there, or set the port for ssh."
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror
            problem, remedy = (
                f"{why} from its port {where[1]} within {_SECONDS:g} s",
                "Check that the host is up and that no firewall blocks the port.",
            )
        remedy += f" Try: ssh {name} true."
        self._findings[name] = Finding(Severity.ERROR, f"ssh to host {name}", problem, remedy)


def ssh_address(name: str) -> tuple[str, int] | None:
    """Returns the host and port that ssh would connect to; None: ssh uses a proxy, or cannot be queried."""
    try:
        done = subprocess.run(
            ["ssh", "-G", name], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    options = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    proxied = any(options.get(name, "none") != "none" for name in ("proxyjump", "proxycommand"))
    if done.returncode != 0 or proxied or not options.get("port", "").isdigit() or not options.get("hostname"):
        return None
    return options["hostname"], int(options["port"])

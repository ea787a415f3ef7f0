"""The rendezvous for torch.distributed's store without MASTER_ADDR, for ranks that a launcher started."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from keras_ddl import communicator
from keras_ddl.compat import replacing
from keras_ddl.topology.launcher import find_launcher
from torch.distributed import Store, TCPStore

# Variables of Open MPI, of MPICH and Intel MPI, and of Slurm.
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def install() -> None:
    """Makes "env://", the default of init_process_group, work without MASTER_ADDR.

    Under a launcher, ranks are the launcher's; without one the process is alone.
    """
    launcher = find_launcher()
    own: dict[str, str] = {}  # variables that this module has set
    if launcher is not None and launcher.size is not None and launcher.rank is not None:
        # Scripts choose their device by LOCAL_RANK before they create a process group.
        known = {"RANK": str(launcher.rank), "WORLD_SIZE": str(launcher.size)}
        for name, variables in (("LOCAL_RANK", _LOCAL_RANKS), ("LOCAL_WORLD_SIZE", _LOCAL_SIZES)):
            value = next((os.environ[each] for each in variables if each in os.environ), None)
            if value is not None:
                known[name] = value
        own = {name: value for name, value in known.items() if name not in os.environ}
        os.environ.update(own)
    # Private in PyTorch 2.8 to 2.15: a public function adds handlers, but cannot replace this one.
    module = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    by_environment = module._rendezvous_handlers["env"]

    def handler(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        if "MASTER_ADDR" in os.environ:
            yield from by_environment(url, *args, **kwargs)
            return
        store = _store(**kwargs)
        place = {"RANK": communicator.rank(), "WORLD_SIZE": communicator.size()}  # keras_ddl.regroup() changes them
        os.environ.update({name: str(value) for name, value in place.items() if name in own})
        yield store, communicator.rank(), communicator.size()
        raise RuntimeError("Unable to perform re-rendezvous using the launcher of MPI")

    replacing.set_values([(module, "_rendezvous_handlers", {**module._rendezvous_handlers, "env": handler})])


def _store(**kwargs: Any) -> Store:
    """Returns the job's store, which rank 0 serves at a port that the system chooses. COLLECTIVE."""
    communicator.init()
    rank, size = communicator.rank(), communicator.size()
    timeout = {"timeout": kwargs["timeout"]} if "timeout" in kwargs else {}
    served = TCPStore("0.0.0.0", 0, size, is_master=True, wait_for_workers=False, **timeout) if rank == 0 else None
    host = "127.0.0.1" if communicator.num_hosts() == 1 else socket.gethostname()
    address, port = communicator.broadcast_object((host, served.port if served is not None else 0))
    if rank == 0:
        return served
    return TCPStore(address, port, size, is_master=False, **timeout)

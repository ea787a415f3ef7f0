"""Starts MPI. Only this module imports mpi4py, and only if there is more than one rank.

mpi4py, the native shim and the launcher must use the same MPI. By default, the shim is the one for the launcher's MPI
if several are installed, and mpi4py loads the library that the shim has loaded. If mpi4py has its library already
(imported earlier, or set by its own variables), the shim follows it. This module reports any remaining mismatch.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from keras_ddl import packages
from keras_ddl.communicator.native import native_library
from keras_ddl.communicator.reporting import stack_position
from keras_ddl.errors import CollectiveError, DependencyError
from keras_ddl.topology.launcher import Launcher

if TYPE_CHECKING:
    from mpi4py import MPI

# Whether keras_ddl finalises MPI at the end of this process.
finalises = False


def running() -> bool:
    """Whether the program itself has initialised MPI through mpi4py and not finalised it."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def start(launcher: Launcher | None) -> MPI.Intracomm:
    """Returns MPI.COMM_WORLD, after initialising MPI if the program has not.

    Raises:
        DependencyError: MPI is missing, is of another family than the native library's, was finalised, or does not see
            the ranks that `launcher` started.
    """
    module = _import_mpi(launcher)
    if module.Is_finalized():
        raise DependencyError(
            "MPI cannot be started again after it was finalised. Call keras_ddl.init() before MPI.Finalize()."
        )
    if not module.Is_initialized():  # mpi4py.rc.initialize was set to False
        module.Init_thread(module.THREAD_MULTIPLE)
    _choose_family(module)
    world: MPI.Intracomm = module.COMM_WORLD
    if launcher is not None and launcher.size not in (None, world.size):
        raise DependencyError(
            f"MPI must see all ranks of the launcher. {launcher.name} started {launcher.size} processes (this is rank "
            f"{launcher.rank}), but {_version(module)} sees {world.size}: it was not started by its own launcher. "
            f"{_remedy()}"
        )
    return world


class MpiTransport(native_library.Transport):
    """The connection of ranks by MPI."""

    def split(self, ranks: Sequence[int], tag: int) -> MpiTransport:
        """See Transport.split."""
        part = MpiTransport()
        native_library.mpi_split(self, ranks, tag % 32768, part)
        return part

    def for_messages(self) -> MpiMessages:
        return MpiMessages(self)


def transport(comm: MPI.Intracomm) -> MpiTransport:
    """Returns the transport of an MPI communicator. COLLECTIVE over its ranks. Raises: as native_library.mpi_create."""
    result = MpiTransport()
    native_library.mpi_create(comm.py2f(), result)
    return result


class MpiMessages:
    """Sends and receives messages over a transport, which it takes over."""

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._module = sys.modules["mpi4py.MPI"]
        self._comm = self._module.Comm.f2py(native_library.mpi_shim().ddl_mpi_handle(transport))
        # MPI's largest tag is reserved for the message by which a rank leaves.
        self.largest_tag = self._module.COMM_WORLD.Get_attr(self._module.TAG_UB) - 1

    def send(self, data: Any, to: int, tag: int) -> _Request:
        """Begins to send the bytes of a NumPy array."""
        return _Request(self._module, self._comm.Isend(data, to, tag), receives=False)

    def receive(self, data: Any, source: int | None, tag: int) -> _Request:
        """Begins to receive into the memory of a NumPy array, from rank `source`, or from any rank if None."""
        sender = {} if source is None else {"source": source}
        return _Request(self._module, self._comm.Irecv(data, tag=tag, **sender), receives=True)

    def leave(self, *, clean: bool) -> None:
        """Leaves the transport, which is freed when all ranks have. `clean`: no operation is pending in MPI."""
        native_library.mpi_shim().ddl_mpi_leave(self._transport, clean)


class _Request:
    """A send or a receive. `source` and `length` describe the received message."""

    def __init__(self, module: Any, request: MPI.Request, *, receives: bool) -> None:
        self._module, self._request, self._receives = module, request, receives
        self.source: int | None = None
        self.length: int | None = None

    def test(self) -> bool:
        """Whether the operation is done. Raises: CollectiveError: it failed."""
        status = self._module.Status()
        try:
            done = self._request.Test(status)
        except self._module.Exception as error:
            raise CollectiveError(str(error)) from None
        if done and self._receives:
            self.source, self.length = status.Get_source(), status.Get_count()
        return done

    def cancel(self) -> bool:
        """Cancels the operation; returns whether its memory is no longer in use."""
        if not self._receives:
            return False  # MPI does not cancel sends
        self._request.Cancel()
        return self._request.Test()


def abort(status: int) -> None:
    """Ends all ranks of the job at once; does not return if MPI is running."""
    if running():
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(status)


def no_exit_status_consensus() -> None:
    """Disables the exchange of exit statuses unless keras_ddl finalises MPI on every rank. Call it on all ranks."""
    native_library.mpi_shim().ddl_mpi_no_exit_status_consensus()


def no_pending_exit_status() -> bool:
    """Announces that this rank ends. Returns whether all ranks did so, none with its own exit status.

    Never blocks.
    """
    return running() and native_library.mpi_shim().ddl_mpi_exit_status_consensus(0) == 0


def _import_mpi(launcher: Launcher | None) -> ModuleType:
    """Imports mpi4py's MPI with the same MPI library as the shim, and takes over when MPI is finalized."""
    fresh = "mpi4py.MPI" not in sys.modules
    hint = None
    if fresh and not {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & os.environ.keys():
        native_library.choose_mpi(*_in_order_of(launcher))
        _warn_about_launcher(launcher)
        hint = native_library.mpi_text("ddl_mpi_loaded_path")
        os.environ["MPI4PY_LIBMPI"] = hint
    try:
        import mpi4py

        # mpi4py would make a rank that ends with an error wait in MPI_Finalize for ranks that wait for it.
        ours = fresh and mpi4py.rc.finalize is None
        if ours:
            mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        except BaseException:
            mpi4py.rc.finalize = None if ours else mpi4py.rc.finalize
            raise
        global finalises
        finalises = finalises or ours
        if ours:
            atexit.register(_finalize_at_exit, MPI, os.getpid())
        return MPI
    except (ImportError, RuntimeError) as error:
        raise DependencyError(
            f"keras_ddl needs mpi4py and an MPI library to run on several ranks. Received: {error}. Install what is "
            f"missing: {packages.install_mpi('mpi4py')}"
        ) from error
    finally:
        if hint is not None:  # only for this process: children must not inherit it
            del os.environ["MPI4PY_LIBMPI"]


def _finalize_at_exit(module: ModuleType, process: int) -> None:
    """Finalises MPI in the last of keras_ddl's atexit functions, before the libraries end."""
    if os.getpid() != process or not module.Is_initialized() or module.Is_finalized():
        return
    family = _family(module)
    ours = family in native_library.mpi_families() and native_library.choose_mpi(family)
    if not ours or native_library.mpi_shim().ddl_mpi_finalize_at_exit() != 0:
        module.Finalize()


def _in_order_of(launcher: Launcher | None) -> list[str]:
    """Returns the installed families of MPI, the launcher's probable family first."""
    hydra = launcher is not None and launcher.name in ("MPICH or Intel MPI", "MVAPICH")
    return sorted(native_library.mpi_families(), key=lambda family: (family == "MPICH") != hydra)


def _warn_about_launcher(launcher: Launcher | None) -> None:
    # Most builds of MPICH end the process when they see Open MPI's PMIx, and no error can be caught. Some can use it.
    used = native_library.mpi_text("ddl_mpi_library")
    if launcher is not None and launcher.name == "Open MPI" and launcher.name != used:
        why = f"was built for {used}" if len(native_library.mpi_families()) == 1 else f"sees only {used}"
        stack_position.warn(
            f"The ranks were started by Open MPI's mpirun, but keras_ddl {why}, and this MPI may refuse to "
            f"start now. {_remedy()}",
            RuntimeWarning,
        )


def _family(module: ModuleType) -> str:
    return "Open MPI" if module.get_vendor()[0] == "Open MPI" else "MPICH"


def _choose_family(module: ModuleType) -> None:
    """Chooses the shim for the MPI that mpi4py has loaded. Raises: DependencyError: it is not installed."""
    if _family(module) in native_library.mpi_families():
        native_library.choose_mpi(_family(module))
    else:
        ours = f"{native_library.mpi_text('ddl_mpi_library')} ({native_library.mpi_text('ddl_mpi_loaded_path')})"
        raise DependencyError(
            f"mpi4py and keras_ddl must use one MPI. mpi4py has loaded {_version(module)}, but keras_ddl was built for "
            f"{ours}. Unset MPI4PY_LIBMPI and MPI4PY_MPIABI (now {os.environ.get('MPI4PY_LIBMPI')!r} and "
            f"{os.environ.get('MPI4PY_MPIABI')!r}) or set MPI4PY_LIBMPI to keras_ddl's MPI library. To use mpi4py's "
            "MPI instead, install the wheel of `make wheel`, which supports both, or reinstall keras_ddl with MPICC "
            "set to the mpicc of that MPI."
        )


def _version(module: ModuleType) -> str:
    version: str = module.Get_library_version()
    return version.split("\n")[0].split(",")[0].strip("\0 ")


def _remedy() -> str:
    site = native_library.mpi_text("ddl_mpi_site_launcher")
    if site:
        return f"Start the ranks with {site}, or reinstall keras_ddl with MPICC set to the mpicc of the launcher's MPI."
    slurm = "pmix" if native_library.mpi_text("ddl_mpi_library") == "Open MPI" else "pmi2"
    use_launchers = "reinstall keras_ddl with MPICC set to the mpicc of the launcher's MPI"
    if len(native_library.mpi_families()) > 1:
        use_launchers = "load the module of the launcher's MPI, so that its libmpi is found (LD_LIBRARY_PATH)"
    return (
        "Start the ranks with `keras-ddl run` or with the mpirun of this Python environment (under Slurm: srun "
        f"--mpi={slurm}), or {use_launchers}."
    )

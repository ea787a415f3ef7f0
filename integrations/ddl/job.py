"""Describes this process as one of DDL's learners: its rank, and when it reduces gradients."""

from __future__ import annotations

import os
import sys

from keras_ddl import communicator, config
from keras_ddl.communicator.comparison import require_equal
from keras_ddl.compat.tensorflow import tf
from keras_ddl.ddl.options import Options, group_elements, parse
from keras_ddl.device import configure_tensorflow
from keras_ddl.errors import ConfigError, NotInitializedError
from keras_ddl.gradients.bucket_size import BucketSize, agree
from keras_ddl.topology import Topology, parse_mode
from keras_ddl.topology.launcher import find_launcher

# IBM counts a group in elements of four bytes.
_ELEMENT_BYTES = 4


class _State:
    options = Options()
    bucket_size = BucketSize(0, measured=False)
    device = ""
    ready = False


def init(options: str = "") -> None:
    """Works like `ddl.init`, without changing TensorFlow and Keras."""
    parsed = parse(options)
    group = group_elements(os.environ)
    if is_alone():
        return
    if not communicator.is_initialized():
        communicator.init(None if config.is_set("MODE") else parsed.mode)
    elif _State.ready and not options.strip():
        return
    place = communicator.topology()
    if not config.is_set("MODE") and not _is_box_of(parsed.mode, place):
        raise ConfigError(
            f"ddl.init: the mode of a running job cannot change. Received: {options!r} on rank {place.rank}, "
            f"initialised with {place.mode!r}. Leave DDL_OPTIONS unset (ddlrun -no_ddloptions), or leave out the mode "
            "here."
        )
    require_equal(
        parsed, "ddl/options", "ddl.init: the options must be equal on all ranks.", "Give all ranks the same."
    )
    _State.options, _State.ready = parsed, True
    if place.size > 1:
        _State.device = configure_tensorflow(place)
        _State.bucket_size = agree(None if group is None else group * _ELEMENT_BYTES)
    if parsed.dbg_level and (place.rank == 0 or parsed.dbg_level > 1):
        say(f"{communicator.describe()}; device {_State.device or 'the default'}")


def options() -> Options:
    return _State.options


def bucket_size() -> BucketSize:
    """Returns the size limit of one reduction, equal on all ranks."""
    return _State.bucket_size


def is_alone() -> bool:
    """Whether no launcher started this process and it has joined no other ranks."""
    return find_launcher() is None and not (communicator.is_initialized() and communicator.size() > 1)


def is_training_together() -> bool:
    """Whether to reduce gradients here: there are several ranks, and no tf.distribute strategy that does."""
    return communicator.is_initialized() and communicator.size() > 1 and not tf.distribute.has_strategy()


def require_ranks(what: str) -> None:
    """Raises: NotInitializedError: there are no other ranks for `what`."""
    if is_alone():
        raise NotInitializedError(
            f"ddl.{what} needs a job of DDL. Received: a process that was started alone, as rank 0 of size 1. "
            "Start the script with `ddlrun` or, if it calls ddl.init(), with `keras-ddl run -np N`."
        )
    if not communicator.is_initialized():
        raise NotInitializedError(
            f"ddl.{what} needs a call of ddl.init(options) before it, or DDL_OPTIONS in the environment when ddl is "
            "imported. Received: neither. Start the script with `ddlrun`, which sets DDL_OPTIONS, as in `ddlrun "
            "-accelerators 2 python train.py`, or call ddl.init() after `import ddl`."
        )


def rank() -> int:
    """Returns the number of this process, 0 <= rank < size; 0 when it was started alone."""
    return 0 if _alone("rank()") else communicator.rank()


def size() -> int:
    """Returns the number of ranks; 1 when this process was started alone."""
    return 1 if _alone("size()") else communicator.size()


def local_rank() -> int:
    """Returns the position of this rank among the ranks of its host, which is also the number of its GPU."""
    return 0 if _alone("local_rank()") else communicator.local_rank()


def num_hosts() -> int:
    """Returns the number of hosts that run a rank."""
    return 1 if _alone("num_hosts()") else communicator.num_hosts()


def say(text: str) -> None:
    """Prints a line of -dbg_level or -dump_iter on stderr."""
    print(f"DDL {communicator.rank()}] {text}", file=sys.stderr, flush=True)


def _is_box_of(mode: str | None, place: Topology) -> bool:
    """Whether a running job accepts `mode`: None, its own mode, or a mode with its box."""
    return mode in (None, place.mode) or parse_mode(mode, place.hosts) == (place.dims, place.group)


def _alone(what: str) -> bool:
    if is_alone():
        return True
    require_ranks(what)
    return False

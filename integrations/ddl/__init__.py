"""The interface of IBM's DDL for TensorFlow scripts (`import ddl`), on top of keras_ddl.

If DDL_OPTIONS is set, as by `ddlrun`, importing this module joins the process with the other ranks; otherwise
`ddl.init(options)` does. From then on a session of tf.compat.v1 sees its rank's device, trainable variables start from
rank 0's values, and every optimizer of tf.compat.v1.train and of Keras averages gradients over all ranks. A process
that was started alone is rank 0 of size 1 and trains as without DDL; the collectives raise. See
integrations/ddl/docs/from-ddl.md.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

# Imported on first use: ddlrun reads the options without TensorFlow.
_HOME_OF = {
    **dict.fromkeys(("DDLCallback", "DDLGlobalVariablesCallback"), "callbacks"),
    **dict.fromkeys(("local_rank", "num_hosts", "rank", "size"), "job"),
    **dict.fromkeys(("allreduce_n", "bcast", "grads_reduce"), "reduction"),
    **dict.fromkeys(("disable_broadcast", "enable_broadcast"), "start"),
}
__all__ = sorted({"init", *_HOME_OF})
_installed = False


def init(options: str = "") -> None:
    """Joins this process with the other ranks, as `import ddl` does if DDL_OPTIONS is set. COLLECTIVE.

    Started alone, without `ddlrun`, `keras-ddl run` or mpirun, it checks the options and does nothing else.

    Args:
        options: DDL's options, such as "-mode p:4x2 -dbg_level 1 -dump_iter 100"; modes p, r, b, n, m and c.

    Raises:
        ConfigError: an option is unknown, the product of the dimensions is not the number of ranks, or the mode
            differs from the one in DDL_OPTIONS, which is already in effect.
    """
    global _installed
    from keras_ddl.ddl import job

    job.init(options)
    if _installed or job.size() == 1:
        return
    _installed = True
    from keras_ddl.ddl import monitored, optimizers, start
    from keras_ddl.device import sessions

    for module in (start, sessions, optimizers, monitored):
        module.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ddl' has no attribute {name!r}. It has: {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"keras_ddl.ddl.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if "DDL_OPTIONS" in os.environ:
    init(os.environ["DDL_OPTIONS"])

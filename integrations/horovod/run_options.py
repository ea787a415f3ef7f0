"""The option --as-horovod of `keras-ddl run`, for programs that import Horovod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_ddl.cli.option_kinds import Rare
from keras_ddl.cli.part_options import RunOptions


class HorovodOptions(RunOptions):
    """Makes `import horovod` find keras_ddl."""

    options = (Rare(["--as-horovod"], is_flag=True, help="Make `import horovod.tensorflow` find keras_ddl.horovod."),)

    def environment(self, values: Mapping[str, Any], env: dict[str, str]) -> dict[str, str]:
        """Returns the variables; with --as-horovod also a PYTHONPATH in which `import horovod` finds keras_ddl.

        Raises: ConfigError: a Horovod is installed on this host; on other hosts the ranks check that.
        """
        if not values["as_horovod"]:
            return env
        from keras_ddl.horovod import installation
        from keras_ddl.launch.rank.rank_environment import python_path

        installation.check_no_other()
        return {**env, "PYTHONPATH": installation.python_path(env.get("PYTHONPATH", python_path()))}

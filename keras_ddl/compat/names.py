"""Names that Keras makes. Imports no Keras."""

from __future__ import annotations

import re
from typing import Any


def plain_name(name: str) -> str:
    """Returns a name or path without the numbers that Keras appends: "dense_2/kernel" gives "dense/kernel".

    Keras counts objects per process, and a rank may have made another model before. Names by which ranks match must not
    depend on these counts.
    """
    return re.sub(r"_\d+(?=[/_]|$)", "", name)


def is_seed(variable: Any) -> bool:
    """Whether a Keras variable is the state of a seed generator."""
    return bool(variable.path.endswith("seed_generator_state"))

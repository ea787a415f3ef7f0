"""Parses --signature and --encoded-images of keras-ddl export."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from keras_ddl.errors import ConfigError


def parse_signatures(by_names: Iterable[str], by_images: Iterable[str]) -> dict[str, Any]:
    """Returns the argument `signatures` of `export_saved_model`.

    Args:
        by_names: "NAME:OUTPUT,PUBLIC=OUTPUT,..."
        by_images: "NAME" or "NAME:OPTION=VALUE,...", with the options of `EncodedImages`.
    Raises: ConfigError: wrong syntax, or a name twice.
    """
    signatures: dict[str, Any] = {}
    for text, read in [*((each, _outputs) for each in by_names), *((each, _images) for each in by_images)]:
        name, _, rest = text.partition(":")
        if name in signatures:
            raise ConfigError(f"Each signature needs a unique name. Received: {name!r} twice.")
        signatures[name] = read(text, rest)
    return signatures


def _outputs(text: str, rest: str) -> dict[str, str]:
    pairs = [each.strip().partition("=") for each in rest.split(",")]
    outputs = {public: source or public for public, _, source in pairs}
    if not all(outputs) or len(outputs) < len(pairs):
        raise ConfigError(
            f"--signature must be NAME:OUTPUT,... with names of outputs or layers, each once, or PUBLIC=OUTPUT. "
            f"Received: {text!r}."
        )
    return outputs


def _images(text: str, rest: str) -> Any:
    from keras_ddl.export.signatures.encoded_images import EncodedImages

    options: dict[str, Any] = {}
    for each in filter(None, rest.split(",")):
        name, equals, value = (part.strip() for part in each.partition("="))
        read = _OPTIONS.get(name)
        try:
            if read is None or not equals or name in options:
                raise ValueError("unknown option" if read is None else "an option must be NAME=VALUE, once")
            options[name] = read(value)
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"--encoded-images must be NAME:OPTION=VALUE,... with options of {', '.join(_OPTIONS)}; several "
                f"numbers or outputs are separated by spaces. Received: {each!r} in {text!r}: {error}."
            ) from None
    return EncodedImages(**options)


def _numbers(text: str) -> float | list[float]:
    values = [float(Fraction(each)) for each in text.split()]
    if not values:
        raise ValueError("a number is missing")
    return values[0] if len(values) == 1 else values


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("must be yes or no")
    return text == "yes"


def _size(text: str) -> tuple[int, int]:
    height, width = (int(each) for each in text.split("x"))
    return height, width


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "input": str,
    "outputs": str.split,
    "resize": str,
    "antialias": _yes_or_no,
    "fit": str,
    "scale": _numbers,
    "offset": _numbers,
    "mean": _numbers,
    "std": _numbers,
    "bgr": _yes_or_no,
    "size": _size,
    "name": str,
}

"""Writes the certificate of a verification as text, and as JSON with documented fields (docs/verify.md)."""

from __future__ import annotations

import datetime
import math
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

from keras_ddl import config, packages
from keras_ddl.launch.output import masking
from keras_ddl.verify import compare
from keras_ddl.verify.compare import Judgement, Row
from keras_ddl.verify.verification import DIFFERENT, EQUAL, EXIT_STATUS, Precision, Verification

FORMAT = 1
_MOST_NAMES = 10
_LOSS = "returned loss"  # as recorder.py names it


def as_json(verification: Verification, command: Sequence[str]) -> dict[str, Any]:
    """Returns the certificate as JSON. Distances that are infinite are strings, "inf"."""
    facts = verification.facts
    traces = facts.get("traces", {})
    return {
        "format": FORMAT,
        "verdict": verification.verdict,
        "exit_status": EXIT_STATUS[verification.verdict],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": masking.shown(command),
        "ranks": verification.num_ranks,
        "steps_asked": verification.steps,
        "factor": compare.FACTOR,
        "precisions": [_precision(each) for each in verification.precisions],
        "replicated": {
            name: {"operations": each["replicated"], "share": each["replicated_share"]}
            for name, each in traces.items()
            if each["replicated"]
        },
        "random": {
            "seed": facts.get("seed"),
            "seeded_by": facts.get("seeded_by"),
            "draws": {name: each["random"] for name, each in traces.items() if each["random"]},
        },
        "collectives": {name: {key: each[key] for key in ("collectives", "bytes")} for name, each in traces.items()},
        "strategy": facts.get("strategy", []),
        "environment": facts.get("environment", {}),
        "callbacks_left_out": facts.get("callbacks_left_out", []),
        "trained_alone": facts.get("trained_alone", []),
        "files_written": facts.get("files_written", []),
        "notes": verification.notes,
        "versions": {**_installed(), **facts.get("versions", {})},
    }


def _installed() -> dict[str, str]:
    return {
        "keras_ddl": config.version(),
        "keras": packages.version("keras"),
        "tensorflow": packages.version(*packages.TENSORFLOWS),
        "numpy": packages.version("numpy"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _precision(each: Precision) -> dict[str, Any]:
    """Returns the part of the certificate about one precision."""
    facts = each.one.recording.facts if each.one is not None else {}
    judgement = each.judgement or Judgement([])
    rows, row, hidden = judgement.rows, judgement.nearest, judgement.useless_from
    runs = (
        ("one_process", each.one),
        ("ranks", each.ranks),
        ("weights_perturbed", each.last_bit),
        ("one_process_again", each.again),
    )
    return {
        "precision": each.floatx or "own",
        "floatx": facts.get("floatx"),
        "dtypes": each.dtypes,
        "compute_dtypes": facts.get("compute_dtypes", []),
        "verdict": each.verdict,
        "why": each.why,
        "deterministic": each.is_deterministic,
        "ranks_bitwise_equal": each.ranks_equal,
        "failures": {name: run.failure for name, run in runs if run is not None and run.failure},
        "seconds": {name: round(run.seconds, 1) for name, run in runs if run is not None},
        "steps_compared": judgement.steps,
        "compared": dict(Counter(row.event.label for row in rows)),
        "ranks_from_one_process": None if row is None else _number(row.far),
        "one_process_from_itself": None if row is None else _number(row.drift),
        "rounding_allows": None if row is None else _number(row.allowed),
        "farthest": None if row is None else {"step": row.event.step, "name": row.nearest},
        "first_difference": _first_difference(judgement.first_beyond),
        "by_step": [
            {
                "step": row.event.step,
                "event": row.event.label,
                "ranks": _number(row.far),
                "itself": _number(row.drift),
                "allowed": _number(row.allowed),
            }
            for row in rows
        ],
        "rounding_hides_from_step": None if hidden is None else hidden.step,
        "rounding_hides": judgement.hidden,
        "flipped": {name: _number(far) for name, far in judgement.flips.items()},
    }


def _first_difference(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        "step": row.event.step,
        "event": row.event.label,
        "names": {name: _number(far) for name, far in row.beyond[:_MOST_NAMES]},
        "count": len(row.beyond),
        "of": len(row.ranks.by_name),
        "rounding_allows": _number(row.limits[row.beyond[0][0]]) if row.beyond else _number(row.allowed),
        "loss_is_equal": None if (loss := row.ranks.by_name.get(_LOSS)) is None else loss <= row.limits[_LOSS],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def as_text(certificate: dict[str, Any]) -> str:
    """Returns the certificate as text."""
    ranks = "1 rank" if certificate["ranks"] == 1 else f"{certificate['ranks']} ranks"
    headline = {
        EQUAL: f"EQUAL: {ranks} compute what one process computes, up to rounding.",
        DIFFERENT: f"DIFFERENT: {ranks} do not compute what one process computes.",
    }
    lines = [headline.get(certificate["verdict"], f"UNKNOWN: whether {ranks} compute what one process computes.")]
    lines += ["", *_table(certificate["precisions"]), ""]
    for each in certificate["precisions"]:
        if each["why"]:
            lines.append(f"{_title(each)}: {each['why']}")
        for name, failure in each["failures"].items():
            if failure not in each["why"]:
                lines.append(f"{_title(each)}: {name.replace('_', ' ')}: {failure}")
        if each["first_difference"]:
            lines += _difference(each["first_difference"])
        if each["precision"] == "float64" and each["dtypes"] not in ([], ["float64"]):
            lines.append(
                f"float64: the program sets dtypes itself, so weights were {', '.join(each['dtypes'])}: this run "
                "proves no more than a run in the program's own precision"
            )
        if coarse := [name for name in each["compute_dtypes"] if name in ("bfloat16", "float16")]:
            lines.append(
                f"{_title(each)}: layers compute in {', '.join(coarse)}, whose rounding hides what is smaller than "
                f"{each['rounding_allows'] or 0.0:.0e}; without mixed precision the proof is sharper"
            )
        if each["rounding_hides_from_step"] is not None:
            lines.append(f"{_title(each)}: not compared from step {each['rounding_hides_from_step']} on, where "
                         "rounding alone changes one process too much")  # fmt: skip
        if each["rounding_hides"]:
            some = ", ".join(each["rounding_hides"][:_MOST_NAMES])
            lines.append(f"{_title(each)}: not compared in some steps, because rounding hides it: {some}")
        if each["flipped"]:
            some = ", ".join(f"{name} by {_shown(far)}" for name, far in each["flipped"].items())
            lines.append(f"{_title(each)}: counts of rows differ where nothing else does: either rounding has changed "
                         f"the class of a row, or the metric is wrong; a float64 run shows which: {some}")  # fmt: skip
    rows = [
        ("command", certificate["command"]),
        ("date", certificate["date"]),
        ("versions", _versions(certificate["versions"])),
        ("compared", _compared(certificate["precisions"])),
        ("replicated", _replicated(certificate["replicated"], certificate["collectives"])),
        ("random", _random(certificate["random"], certificate["collectives"])),
        ("strategy", _options(certificate["strategy"], certificate["environment"])),
    ]
    if certificate["callbacks_left_out"]:
        rows.append(
            ("left out", f"callbacks that write files or resume: {', '.join(certificate['callbacks_left_out'])}")
        )
    if certificate["trained_alone"]:
        names = ", ".join(certificate["trained_alone"])
        rows.append(("alone", f"made outside of the scope, so each rank trains all of it: {names}"))
    if certificate["files_written"]:
        some = certificate["files_written"][:_MOST_NAMES]
        rows.append(("written", f"outside of the copy of the working directory: {', '.join(some)}"))
    rows += [("note", each) for each in certificate["notes"]]
    return "\n".join([*lines, *(f"{name:<11} {text}" for name, text in rows)])


def _table(precisions: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a table with a column for each precision."""

    def shown(each: dict[str, Any], name: str) -> str:
        value = each.get(name)
        return "-" if value is None else _shown(value)

    def farthest(each: dict[str, Any]) -> str:
        where = each["farthest"]
        return f"{where['name']}, step {where['step']}" if where and where["name"] else "-"

    def first(each: dict[str, Any]) -> str:
        where = each["first_difference"]
        return f"step {where['step']}" if where else "none" if each["steps_compared"] else "-"

    equal = {True: "yes, bitwise", False: "NO", None: "-"}
    twice = {True: "yes", False: "NO", None: "-"}
    rows = [
        ("", [_title(each) for each in precisions]),
        ("verdict", [each["verdict"] for each in precisions]),
        ("training steps compared", [str(each["steps_compared"]) for each in precisions]),
        ("ranks from one process", [shown(each, "ranks_from_one_process") for each in precisions]),
        ("  farthest", [farthest(each) for each in precisions]),
        ("one process, weights perturbed", [shown(each, "one_process_from_itself") for each in precisions]),
        ("rounding allows", [shown(each, "rounding_allows") for each in precisions]),
        ("first beyond that", [first(each) for each in precisions]),
        ("ranks equal to each other", [equal[each["ranks_bitwise_equal"]] for each in precisions]),
    ]
    if any(each["failures"] for each in precisions):
        ended = [", ".join(each["failures"]).replace("_", " ") for each in precisions]
        rows.append(("ended with an error", [each or "none" for each in ended]))
    if any(each["deterministic"] is not None for each in precisions):
        rows.append(("one process twice is equal", [twice[each["deterministic"]] for each in precisions]))
    names = max(len(name) for name, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(precisions))]
    return [
        f"{name:<{names}}  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)).rstrip()
        for name, cells in rows
    ]


def _title(each: dict[str, Any]) -> str:
    """Returns the name of a precision; the program's own is named with its dtypes."""
    if each["precision"] == "float64":
        return "float64"
    return f"as it is ({', '.join(dict.fromkeys([*each['dtypes'], *each['compute_dtypes']])) or 'nothing trained'})"


def _difference(first: dict[str, Any]) -> list[str]:
    """Describes the first difference, the largest distance first."""
    names = [(name, "cannot be compared" if far == "inf" else f"{far:.1e}") for name, far in first["names"].items()]
    width = max((len(name) for name, _ in names), default=0)
    lines = [f"  step {first['step']}, {first['event']}: {first['count']} of {first['of']} values differ"]
    if first["loss_is_equal"]:
        lines[0] += ", and the loss does not: look at the gradient or the update of these"
    return lines + [f"    {name:<{width}}  {far}" for name, far in names]


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _compared(precisions: Sequence[dict[str, Any]]) -> str:
    counts: Counter[str] = Counter()
    for each in precisions:
        for label, count in each["compared"].items():
            counts[label] = max(counts[label], count)
    return ", ".join(f"{label} ({count})" for label, count in counts.items()) or "nothing"


def _replicated(replicated: dict[str, Any], traced: dict[str, Any]) -> str:
    if not replicated:
        return "nothing: every operation on the batch is shared by the ranks" if traced else "not known"
    return "; ".join(
        f"{step}: {', '.join(f'{name} ({count})' for name, count in each['operations'].items())}, "
        f"{_percent(each['share'])} of its arithmetic"
        for step, each in replicated.items()
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _random(random: dict[str, Any], traced: dict[str, Any]) -> str:
    if random["seed"] is None:
        return "not known"
    who = {"verify": "by verify, because the program sets none"}.get(random["seeded_by"], "by the program")
    draws = "; ".join(
        f"{step} draws {', '.join(f'{count} {how}' for how, count in each.items())}"
        for step, each in random["draws"].items()
    )
    return (
        f"seed {random['seed']}, set {who}; {draws or ('no step draws' if traced else 'what steps draw is not known')}"
    )


def _options(strategies: Sequence[dict[str, Any]], environment: dict[str, str]) -> str:
    texts = []
    for each in strategies:
        chosen = [f"{name}={each['options'][name]}" for name in each["chosen"]]
        texts.append(f"Strategy({', '.join(chosen)})")
    return "; ".join([*texts, *(f"{name}={value}" for name, value in environment.items())]) or "not known"

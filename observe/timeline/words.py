"""Writes a summary as sentences, for the terminal and the page."""

from __future__ import annotations

from keras_ddl.timeline.summary import PARTS, Straggler, Summary


def sentences(summary: Summary) -> list[str]:
    """Returns the sentences, the most important first."""
    hosts = len({each.host for each in summary.ranks})
    ranks = len(summary.ranks)
    lines = [
        f"{_many(ranks, 'rank')} on {_many(hosts, 'host')}, {_many(summary.steps, 'step')}, "
        f"{duration(summary.step)} a step"
        + (f", without {summary.unusual} that took more than ten times as long." if summary.unusual else ".")
    ]
    if ranks == 1:
        return [*lines, "A single rank waits for no other."]
    lines += [_straggler_text(each) for each in summary.stragglers]
    if not summary.stragglers:
        last = max(summary.ranks, key=lambda each: each.last)
        lines.append(
            f"No rank delays others much: rank {last.rank} was last most often, in {last.last:.0%} of the steps, by "
            f"{duration(last.late)} in the median."
        )
    part = summary.exposed / summary.step if summary.step else 0.0
    lines.append(
        f"Exposed communication: {duration(summary.exposed)} a step ({part:.0%}), of which "
        f"{duration(summary.late_ranks)} are spent waiting for late ranks."
    )
    return lines


def _straggler_text(one: Straggler) -> str:
    where = f" ({one.host})" if one.host else ""
    text = f"Rank {one.rank}{where} was last in {one.last:.0%} of the steps, by {duration(one.late)} in the median; "
    if not one.causes:
        return text + "no part of its steps is longer than on the other ranks: check its clock and its host."
    causes = [f"its {PARTS[part]} took {duration(more)} more" for part, more in one.causes.items()]
    return text + " and ".join(causes) + "."


def duration(seconds: float) -> str:
    """Returns e.g. "14 ms", with two digits below ten."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            count = seconds / size
            return f"{count:.0f} {unit}" if count >= 9.95 or count == 0 else f"{count:.1f} {unit}"
    raise AssertionError(seconds)


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("s" if count != 1 else "")

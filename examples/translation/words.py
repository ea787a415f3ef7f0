"""Numbers, ordinals, years, dates and times of day in English and German words.

The words come from num2words and Babel. Large numbers are built here from parts, because num2words 0.5.14 says
"einhunderteinstausend" for 101,000 instead of "einhunderteintausend", and because looking up parts is faster.
"""

from __future__ import annotations

import functools

from babel.dates import get_day_names, get_month_names
from num2words import num2words

LARGEST = 1_000_000
_CLOCK = {5: ("five past {0}", "fünf nach {0}"), 10: ("ten past {0}", "zehn nach {0}")}
_CLOCK |= {15: ("quarter past {0}", "Viertel nach {0}"), 20: ("twenty past {0}", "zwanzig nach {0}")}
_CLOCK |= {25: ("twenty-five past {0}", "fünf vor halb {1}"), 30: ("half past {0}", "halb {1}")}
_CLOCK |= {35: ("twenty-five to {1}", "fünf nach halb {1}"), 40: ("twenty to {1}", "zwanzig vor {1}")}
_CLOCK |= {45: ("quarter to {1}", "Viertel vor {1}"), 50: ("ten to {1}", "zehn vor {1}")}
_CLOCK |= {55: ("five to {1}", "fünf vor {1}")}


@functools.cache
def _below_thousand(number: int, language: str) -> str:
    return num2words(number, lang=language)


def cardinal(number: int, language: str) -> str:
    """Returns a number from 0 to a million in words, as one counts: 21 is "twenty-one", "einundzwanzig"."""
    if number == LARGEST:
        return "one million" if language == "en" else "eine Million"
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _below_thousand(rest, language)
    last = _below_thousand(rest, language) if rest else ""
    if language == "de":
        return before_noun(thousands) + "tausend" + last
    joint = "" if not rest else ", " if rest >= 100 else " and "
    return f"{_below_thousand(thousands, language)} thousand{joint}{last}"


def before_noun(number: int, one: str = "ein") -> str:
    """Returns the German number of things; `one` is the form for a single one ("eine Stunde", "einem Tag").

    Numbers such as 101, which end in -eins, have their form in compounds ("einhunderteintausend").
    """
    if number == 1:
        return one
    words = cardinal(number, "de")
    return words.removesuffix("s") if number % 100 == 1 else words


@functools.cache
def ordinal(number: int, language: str) -> str:
    """Returns an ordinal from 1 to 999: "twenty-third"; in German as after an article: "(der) dreiundzwanzigste".

    The other German forms add a letter: "(am) dreiundzwanzigsten", "dreiundzwanzigster (Mai)".
    """
    return num2words(number, lang=language, to="ordinal")


@functools.cache
def year(number: int, language: str) -> str:
    """Returns a year from 1100 to 2099 in words: "nineteen ninety-seven", "neunzehnhundertsiebenundneunzig"."""
    return num2words(number, lang=language, to="year")


@functools.cache
def month(number: int, language: str) -> str:
    """Returns the name of month 1 to 12."""
    return get_month_names("wide", locale=language)[number]


@functools.cache
def weekday(number: int, language: str) -> str:
    """Returns the name of a day of the week; 0 is Monday."""
    return get_day_names("wide", locale=language)[number]


def clock(hour: int, minute: int) -> tuple[str, str]:
    """Returns a time of day on twelve hours, in English and German: "half past two", "halb drei".

    Args:
        hour: 1 to 12. minute: a multiple of five, as one reads a clock's hands.
    """
    this, following = hour, hour % 12 + 1
    if minute == 0:
        return f"{cardinal(this, 'en')} o'clock", f"{before_noun(this)} Uhr"
    english, german = _CLOCK[minute]
    return (
        english.format(cardinal(this, "en"), cardinal(following, "en")),
        german.format(cardinal(this, "de"), cardinal(following, "de")),
    )


def digital_clock(hour: int, minute: int) -> tuple[str, str]:
    """Returns a time of day as in timetables: "fourteen oh-five", "vierzehn Uhr fünf".

    Args:
        hour: 1 to 23. minute: 1 to 59.
    """
    oh = "oh-" if minute < 10 else ""
    return (
        f"{cardinal(hour, 'en')} {oh}{cardinal(minute, 'en')}",
        f"{before_noun(hour)} Uhr {cardinal(minute, 'de')}",
    )

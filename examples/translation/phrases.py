"""Phrases with numbers, dates, times of day and amounts of money, in English and German.

Each function draws one kind of phrase. Two phrases that are the same in one language must be the same in the other, so
that each phrase has one right translation. `corpus.py` leaves out phrases that would break this rule.
"""

from __future__ import annotations

import datetime
import functools
from random import Random

from babel.numbers import get_currency_name

from translation.words import cardinal, clock, digital_clock, month, ordinal, weekday, year

Pair = tuple[str, str]

# English singular and plural; German nominative article, singular and plural.
_THINGS = (
    ("book", "books", "ein", "Buch", "Bücher"),
    ("house", "houses", "ein", "Haus", "Häuser"),
    ("child", "children", "ein", "Kind", "Kinder"),
    ("table", "tables", "ein", "Tisch", "Tische"),
    ("tree", "trees", "ein", "Baum", "Bäume"),
    ("apple", "apples", "ein", "Apfel", "Äpfel"),
    ("chair", "chairs", "ein", "Stuhl", "Stühle"),
    ("letter", "letters", "ein", "Brief", "Briefe"),
    ("cat", "cats", "eine", "Katze", "Katzen"),
    ("flower", "flowers", "eine", "Blume", "Blumen"),
    ("bottle", "bottles", "eine", "Flasche", "Flaschen"),
    ("city", "cities", "eine", "Stadt", "Städte"),
    ("kilometre", "kilometres", "ein", "Kilometer", "Kilometer"),
    ("kilogram", "kilograms", "ein", "Kilogramm", "Kilogramm"),
)
# English singular and plural; German "one" in nominative and dative, singular, plural in nominative and dative.
_SPANS = (
    ("minute", "minutes", "eine", "einer", "Minute", "Minuten", "Minuten"),
    ("hour", "hours", "eine", "einer", "Stunde", "Stunden", "Stunden"),
    ("day", "days", "ein", "einem", "Tag", "Tage", "Tagen"),
    ("week", "weeks", "eine", "einer", "Woche", "Wochen", "Wochen"),
    ("month", "months", "ein", "einem", "Monat", "Monate", "Monaten"),
    ("year", "years", "ein", "einem", "Jahr", "Jahre", "Jahren"),
)
_ORDERED = (
    ("the {} day", "der {} Tag"),
    ("the {} house", "das {} Haus"),
    ("the {} page", "die {} Seite"),
    ("the {} time", "das {} Mal"),
    ("on the {} floor", "im {}n Stock"),
    ("in the {} century", "im {}n Jahrhundert"),
    ("in the {} row", "in der {}n Reihe"),
    ("for the {} time", "zum {}n Mal"),
)
_NUMBERED = (
    ("room {}", "Zimmer {}"),
    ("page {}", "Seite {}"),
    ("number {}", "Nummer {}"),
    ("chapter {}", "Kapitel {}"),
    ("{} percent", "{} Prozent"),
    ("minus {}", "minus {}"),
    ("{} degrees", "{} Grad"),
)
# `date` fills in the names, for example "twenty-third", "May", "dreiundzwanzigste", "Mai" and a year.
_DATES = (
    ("the {day} of {month}", "der {Day} {Month}"),
    ("on the {day} of {month}", "am {Day}n {Month}"),
    ("until the {day} of {month}", "bis zum {Day}n {Month}"),
    ("the {day} of {month}, {year}", "der {Day} {Month} {Year}"),
    ("{day} of {month}, {digits}", "{Day}r {Month} {digits}"),
    ("on the {day} of {month}, {year}", "am {Day}n {Month} {Year}"),
    ("since the {day} of {month}, {year}", "seit dem {Day}n {Month} {Year}"),
    ("on {weekday}, the {day} of {month}", "am {Weekday}, dem {Day}n {Month}"),
    ("{weekday}, the {day} of {month}, {year}", "{Weekday}, der {Day} {Month} {Year}"),
    ("on {weekday}, the {day} of {month}, {year}", "am {Weekday}, dem {Day}n {Month} {Year}"),
    ("he was born on the {day} of {month}, {year}", "er wurde am {Day}n {Month} {Year} geboren"),
    ("in {month}, {year}", "im {Month} {Year}"),
    ("in the year {year}", "im Jahr {Year}"),
    ("in {month}, {digits}", "im {Month} {digits}"),
)
_TIMES = (
    ("{time}", "{Time}"),
    ("at {time}", "um {Time}"),
    ("at {time} on {weekday}", "am {Weekday} um {Time}"),
    ("today at {time}", "heute um {Time}"),
    ("tomorrow at {time}", "morgen um {Time}"),
    ("yesterday at {time}", "gestern um {Time}"),
    ("on {weekday} {part} at {time}", "am {Weekday}{part_} um {Time}"),
    ("the meeting begins on {weekday} at {time}", "die Besprechung beginnt am {Weekday} um {Time}"),
    ("from {time} to {end}", "von {Time} bis {End}"),
    ("on the {day} of {month} at {time}", "am {Day}n {Month} um {Time}"),
)
_PARTS = (
    ("morning", "morgen", range(6, 12)),
    ("afternoon", "nachmittag", range(1, 6)),
    ("evening", "abend", range(6, 11)),
)
_TIMETABLE = (
    ("at {}", "um {}"),
    ("the train leaves at {}", "der Zug fährt um {} ab"),
    ("the train arrives at {}", "der Zug kommt um {} an"),
    ("the shop opens at {}", "der Laden öffnet um {}"),
)
_CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "SEK", "NOK", "DKK", "CZK", "HUF", "INR", "CAD", "AUD")
_CENTS = {"EUR": ("cents", "Cent"), "USD": ("cents", "Cent"), "GBP": ("pence", "Pence")}
_AMOUNTS = (
    ("{}", "{}"),
    ("for {}", "für {}"),
    ("it costs {}", "es kostet {}"),
    ("the ticket costs {}", "die Fahrkarte kostet {}"),
    ("more than {}", "mehr als {}"),
    ("less than {}", "weniger als {}"),
    ("she paid {}", "sie hat {} bezahlt"),
)


def phrase(draw: Random) -> Pair:
    """Returns a phrase of a kind drawn by weight, as (English, German)."""
    (kind,) = draw.choices(_KINDS, _WEIGHTS)
    return kind(draw)


def number(draw: Random) -> Pair:
    """Returns a number from zero to a million; each number of digits is equally likely."""
    value = _up_to(draw, 1_000_001)
    return cardinal(value, "en"), cardinal(value, "de")


def decimal(draw: Random) -> Pair:
    """Returns a decimal number with single digits after the point: "three point one four"."""
    value, digits = _up_to(draw, 1000), [draw.randrange(10) for _ in range(draw.randint(1, 3))]
    english, german = (" ".join(cardinal(digit, language) for digit in digits) for language in ("en", "de"))
    return f"{cardinal(value, 'en')} point {english}", f"{cardinal(value, 'de')} Komma {german}"


def arithmetic(draw: Random) -> Pair:
    """Returns a correct calculation: "three times four is twelve"."""
    english, german, result = draw.choice(
        (("plus", "plus", int.__add__), ("times", "mal", int.__mul__), ("minus", "minus", int.__sub__))
    )
    one, other = draw.randrange(1, 100), draw.randrange(1, 100)
    one, other = max(one, other), min(one, other)
    all_three = (one, other, result(one, other))
    first, second, third = ((cardinal(value, "en"), cardinal(value, "de")) for value in all_three)
    return f"{first[0]} {english} {second[0]} is {third[0]}", f"{first[1]} {german} {second[1]} ist {third[1]}"


def numbered(draw: Random) -> Pair:
    """Returns something with a number: "room two hundred and four", "forty percent"."""
    return _in_frame(draw.choice(_NUMBERED), *_plural_number(draw, 1000))


def things(draw: Random) -> Pair:
    """Returns counted things: "one book", "seventeen books"."""
    one_en, many_en, article, one_de, many_de = draw.choice(_THINGS)
    if draw.random() < 0.05:
        return f"one {one_en}", f"{article} {one_de}"
    english, german = _plural_number(draw, 100_000)
    return f"{english} {many_en}", f"{german} {many_de}"


def span(draw: Random) -> Pair:
    """Returns a span of time: "in three weeks", "three weeks ago", "two hours and fifteen minutes"."""
    choice = draw.randrange(6)
    if choice == 0:
        return _joined(_plural_number(draw, 100), ("hours and", "Stunden und"), _plural_number(draw, 60), _MINUTES)
    if choice == 1:
        person = draw.choice((("she", "sie"), ("he", "er")))
        return _joined(person, ("is", "ist"), _plural_number(draw, 100), ("years old", "Jahre alt"))
    frame = (("{}", "{}"), ("in {}", "in {}"), ("{} ago", "vor {}"), ("after {}", "nach {}"))[choice - 2]
    dative = choice > 2
    one_en, many_en, *ones, one_de, many_de, many_de_dative = draw.choice(_SPANS)
    if draw.random() < 0.1:
        return _in_frame(frame, f"one {one_en}", f"{ones[dative]} {one_de}")
    english, german = _plural_number(draw, 1000)
    return _in_frame(frame, f"{english} {many_en}", f"{german} {many_de_dative if dative else many_de}")


def ordered(draw: Random) -> Pair:
    """Returns a thing with an ordinal: "the twenty-third day", "in the nineteenth century"."""
    place = draw.randrange(len(_ORDERED))
    value = draw.randrange(1, 1000 if place < 4 else 100)
    return _in_frame(_ORDERED[place], ordinal(value, "en"), ordinal(value, "de"))


def date(draw: Random) -> Pair:
    """Returns a calendar date with its correct day of the week, and a year in words or digits."""
    return _in_frame(draw.choice(_DATES), **_parts_of_a_day(draw))


def time_of_day(draw: Random) -> Pair:
    """Returns a time of day: "at half past two on Tuesday", "am Dienstag um halb drei"."""
    part, part_de, hours = draw.choice(_PARTS)
    frame = draw.choice(_TIMES)
    hour = draw.choice(hours) if "{part}" in frame[0] else draw.randint(1, 12)
    english, german = clock(hour, draw.randrange(0, 60, 5))
    end, end_de = clock(hour % 12 + 1, draw.randrange(0, 60, 5))
    day = _parts_of_a_day(draw)
    return _in_frame(frame, time=english, Time=german, end=end, End=end_de, part=part, part_=part_de, **day)


def timetable(draw: Random) -> Pair:
    """Returns a time as in timetables: "the train leaves at seventeen forty-two"."""
    return _in_frame(draw.choice(_TIMETABLE), *digital_clock(draw.randrange(1, 24), draw.randrange(1, 60)))


def amount(draw: Random) -> Pair:
    """Returns an amount of money: "it costs five euros and twenty cents"."""
    currency, frame = draw.choice(_CURRENCIES), draw.choice(_AMOUNTS)
    if frame == _AMOUNTS[0] and draw.random() < 0.1:
        name = _currency(currency, 1, "de")
        return f"one {_currency(currency, 1, 'en')}", f"{'eine' if name.split()[0].endswith('e') else 'ein'} {name}"
    english, german = _plural_number(draw, 1_000_000)
    english, german = f"{english} {_currency(currency, 2, 'en')}", f"{german} {_currency(currency, 2, 'de')}"
    if currency in _CENTS and draw.random() < 0.5:
        english, german = _joined((english, german), ("and", "und"), _plural_number(draw, 100), _CENTS[currency])
    return _in_frame(frame, english, german)


_MINUTES = ("minutes", "Minuten")
_KINDS = (number, decimal, arithmetic, numbered, things, span, ordered, date, time_of_day, timetable, amount)
_WEIGHTS = (10, 3, 3, 3, 5, 6, 4, 20, 16, 4, 16)


def _up_to(draw: Random, end: int) -> int:
    """Returns a number below `end`; each number of digits is equally likely."""
    digits = draw.randint(1, len(str(end - 1)))
    return draw.randrange(0 if digits == 1 else 10 ** (digits - 1), min(10**digits, end))


def _plural_number(draw: Random, end: int) -> Pair:
    """Returns a number of things, but not one, and no number ending in 01, whose German form is disputed."""
    while (value := _up_to(draw, end)) % 100 == 1 or value == 0:
        pass
    return cardinal(value, "en"), cardinal(value, "de")


def _parts_of_a_day(draw: Random) -> dict[str, str]:
    when = datetime.date(1500, 1, 1) + datetime.timedelta(draw.randrange(550 * 365))
    names = {"day": ordinal(when.day, "en"), "Day": ordinal(when.day, "de"), "digits": str(when.year)}
    for name, function, value in (("month", month, when.month), ("year", year, when.year)):
        names |= {name: function(value, "en"), name.capitalize(): function(value, "de")}
    return names | {"weekday": weekday(when.weekday(), "en"), "Weekday": weekday(when.weekday(), "de")}


@functools.cache
def _currency(code: str, count: int, language: str) -> str:
    name = get_currency_name(code, count=count, locale=language)
    first = name.split()[0]
    # Babel's names begin with a capital, as in lists, but an adjective does not within a German sentence.
    return name[0].lower() + name[1:] if first.endswith(("ische", "ischer", "isches")) else name


def _in_frame(frame: Pair, *words: str, **names: str) -> Pair:
    if words:
        return frame[0].format(words[0]), frame[1].format(words[1])
    return frame[0].format(**names), frame[1].format(**names)


def _joined(*parts: Pair) -> Pair:
    return " ".join(part[0] for part in parts), " ".join(part[1] for part in parts)

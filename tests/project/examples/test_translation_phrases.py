"""The corpus of examples/translation: correct German, and held-out phrases."""

from __future__ import annotations

import gzip
import re

from examples.translation_parts import corpus, words


def test_numbers_are_spoken_correctly():
    said = {
        0: ("zero", "null"),
        1: ("one", "eins"),
        17: ("seventeen", "siebzehn"),
        30: ("thirty", "dreißig"),
        101: ("one hundred and one", "einhunderteins"),
        21_021: ("twenty-one thousand and twenty-one", "einundzwanzigtausendeinundzwanzig"),
    }
    assert {number: tuple(words.cardinal(number, language) for language in ("en", "de")) for number in said} == said


def test_times_of_day_are_spoken_correctly():
    said = {
        (2, 30): ("half past two", "halb drei"),
        (12, 30): ("half past twelve", "halb eins"),
        (1, 0): ("one o'clock", "ein Uhr"),
        (12, 45): ("quarter to one", "Viertel vor eins"),
        (1, 15): ("quarter past one", "Viertel nach eins"),
        (3, 25): ("twenty-five past three", "fünf vor halb vier"),
        (11, 35): ("twenty-five to twelve", "fünf nach halb zwölf"),
        (6, 40): ("twenty to seven", "zwanzig vor sieben"),
    }
    assert {time: words.clock(*time) for time in said} == said
    assert words.digital_clock(1, 5) == ("one oh-five", "ein Uhr fünf")
    assert words.digital_clock(21, 31) == ("twenty-one thirty-one", "einundzwanzig Uhr einunddreißig")


def test_corpus_depends_on_the_seed_and_holds_phrases_out(small, texts, tmp_path):
    again = corpus.make(tmp_path / "again", train=1500, dev=100, test=100)
    zipped = corpus.make(tmp_path / "zipped", train=1500, dev=100, test=100, compress=True)
    other = corpus.make(tmp_path / "other", train=1500, dev=100, test=100, seed=1)
    for part, files in small.items():
        for place, path in enumerate(files):
            assert again[part][place].read_bytes() == path.read_bytes() != other[part][place].read_bytes()
            assert gzip.decompress(zipped[part][place].read_bytes()) == path.read_bytes()
    for place in range(2):
        by_part = [path[place].read_text().splitlines() for path in small.values()]
        assert [len(part) for part in by_part] == [100, 100, 1500]
        assert len(set().union(*by_part)) == 1700  # each phrase once, in each language
    assert not re.search(r"eins(tausend|hundert)|ein (Stunde|Krone)|\d[a-z]", "\n".join(texts[1]))
    assert all(text == text.strip() and text for text in [*texts[0], *texts[1]])

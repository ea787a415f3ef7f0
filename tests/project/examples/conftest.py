"""A small corpus of examples/translation."""

import pytest
from examples.translation_parts import corpus, subwords


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return corpus.make(tmp_path_factory.mktemp("corpus"), train=1500, dev=100, test=100)


@pytest.fixture(scope="session")
def texts(small):
    return [path.read_text().splitlines() for path in small["train"]]


@pytest.fixture(scope="session")
def cut(texts):
    return subwords.train([*texts[0], *texts[1]], 300)

"""scikit-learn's handwritten digits, 8 x 8 scans, for the examples in this folder."""

import numpy as np
from sklearn.datasets import load_digits


def load():
    """Returns (images [n, 64] in 0..1, labels [n]) for training, and the same of 360 held-out scans. Deterministic."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(20).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    return (images[360:], labels[360:]), (images[:360], labels[:360])

"""Draws pictures of 200 classes with NumPy: 10 shapes, filled with or cut out of 5 textures of 2 sizes.

    images, labels = draw(1000, seed=1)

draws about 40,000 pictures a second on one core. Class c is shape c // 20 with texture c % 20. Colours, position, size,
rotation, the phase of the texture, and noise are random for each picture, so that none of them gives a class away. The
same seed draws the same pictures, on every rank and every machine.
"""

from __future__ import annotations

import numpy as np

SIZE = 24  # pixels, in both directions
SHAPES = ("disc", "square", "triangle", "cross", "ring", "star", "ellipse", "crescent", "hexagon", "bars")
PATTERNS = ("stripes", "checks", "dots", "rings", "zigzag")
PERIODS = (0.45, 0.95)  # periods of textures, if the width of a picture is 2
CLASSES = len(SHAPES) * len(PATTERNS) * len(PERIODS) * 2
NOISE = 0.04  # standard deviation of a pixel's colours, which are in 0..1
TURN = 0.25  # largest rotation of shapes and textures, in radians
_AT_ONCE = 2048  # number of pictures whose arrays fit into a cache


def draw(count: int, seed: int, size: int = SIZE, noise: float = NOISE) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, uint8 [count, size, size, 3], and labels, int32 [count], each class equally often.

    Args:
        seed: other seeds give other pictures of the same classes.
        size: pixels in each direction.
        noise: standard deviation of a pixel's colours, which are in 0..1.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count, dtype=np.int32) % CLASSES)
    images = np.empty((count, size, size, 3), np.uint8)
    for start in range(0, count, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        images[part] = _pictures(labels[part], rng, size, noise)
    return images, labels


def name(label: int) -> str:
    """Returns a description of the pictures of a class, such as "disc of fine dots"."""
    shape, texture = divmod(label, CLASSES // len(SHAPES))
    texture, outside = divmod(texture, 2)
    pattern, period = divmod(texture, 2)
    size = ("fine", "coarse")[period]
    return f"{SHAPES[shape]} {'in' if outside else 'of'} {size} {PATTERNS[pattern]}"


def _pictures(labels: np.ndarray, rng: np.random.Generator, size: int, noise: float) -> np.ndarray:
    count = len(labels)
    shape, texture = np.divmod(labels, CLASSES // len(SHAPES))
    texture, outside = np.divmod(texture, 2)
    pattern, period = np.divmod(texture, 2)

    def drawn(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (count, 1, 1)).astype(np.float32)

    axis = (np.arange(size, dtype=np.float32) + 0.5) * (2 / size) - 1
    x, y = _turned(
        axis[None, None, :] - drawn(-0.12, 0.12), axis[None, :, None] - drawn(-0.12, 0.12), drawn(-TURN, TURN)
    )
    scale = drawn(0.65, 0.9)
    inside = np.empty((count, size, size), np.float32)
    for number, distance in enumerate(_DISTANCES):
        mine = shape == number
        inside[mine] = distance(x[mine] / scale[mine], y[mine] / scale[mine])
    inside = np.clip(0.5 - inside * scale * (size / 2), 0, 1)  # the edge is one pixel wide

    # The texture has its own rotation.
    length = np.float32(PERIODS)[period][:, None, None] / (2 * np.pi)
    u, v = _turned(axis[None, None, :] / length, axis[None, :, None] / length, drawn(-TURN, TURN))
    u, v = u + drawn(0, 2 * np.pi), v + drawn(0, 2 * np.pi)
    woven = np.empty_like(inside)
    for number, value in enumerate(_TEXTURES):
        mine = pattern == number
        woven[mine] = value(u[mine], v[mine])
    woven = np.clip(0.5 + 1.5 * woven, 0, 1)

    def colour(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (count, 1, 1, 3)).astype(np.float32)

    fore, back, plain = colour(0.6, 1), colour(0, 0.4), colour(0.35, 0.65)
    filled = woven[..., None] * fore + (1 - woven[..., None]) * back
    share = np.where(outside[:, None, None] == 1, 1 - inside, inside)[..., None]
    picture = share * filled + (1 - share) * plain
    picture += rng.standard_normal(picture.shape, np.float32) * noise
    return (np.clip(picture, 0, 1) * 255).astype(np.uint8)


def _turned(x: np.ndarray, y: np.ndarray, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cosine, sine = np.cos(angle), np.sin(angle)
    return cosine * x + sine * y, cosine * y - sine * x


def _polygon(corners: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sector = 2 * np.pi / corners
    angle = np.mod(np.arctan2(y, x), sector) - sector / 2
    return np.hypot(x, y) * np.cos(angle) - np.cos(sector / 2)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sector = 2 * np.pi / 5
    angle = np.abs(np.mod(np.arctan2(y, x), sector) - sector / 2) / (sector / 2)
    return np.hypot(x, y) - (0.4 + 0.7 * angle)


def _either(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.minimum(one, other)


def _box(x: np.ndarray, y: np.ndarray, width: float, height: float) -> np.ndarray:
    return np.maximum(np.abs(x) - width, np.abs(y) - height)


# For each of SHAPES, the approximate distance to the edge, negative inside; the radius of a shape is about 1.
_DISTANCES = (
    lambda x, y: np.hypot(x, y) - 0.9,
    lambda x, y: _box(x, y, 0.8, 0.8),
    lambda x, y: _polygon(3, x, y),
    lambda x, y: _either(_box(x, y, 1.0, 0.32), _box(x, y, 0.32, 1.0)),
    lambda x, y: np.abs(np.hypot(x, y) - 0.7) - 0.28,
    _star,
    lambda x, y: np.hypot(x, y / 0.5) - 1.05,
    lambda x, y: np.maximum(np.hypot(x, y) - 1.0, 0.75 - np.hypot(x - 0.5, y)),
    lambda x, y: _polygon(6, x, y),
    lambda x, y: _either(_box(x, y - 0.55, 0.95, 0.28), _box(x, y + 0.55, 0.95, 0.28)),
)
# For each of PATTERNS, values in -1..1; the period of the coordinates is 2 pi.
_TEXTURES = (
    lambda u, v: np.sin(u),
    lambda u, v: np.sin(u) * np.sin(v) * 1.5,
    lambda u, v: np.sin(u) + np.sin(v) - 0.8,
    lambda u, v: np.sin(np.hypot(u - np.pi, v - np.pi)),
    lambda u, v: np.sin(u + 1.6 * np.abs(np.mod(v / np.pi, 2) - 1) * np.pi / 2),
)

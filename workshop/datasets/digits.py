"""Handwritten-looking digits, drawn by the computer: a stand-in for MNIST where there is no network.

A digit starts as a glyph of a typeface and is then distorted as a hand would: slanted, turned, stretched, wobbled,
written with a thin or a broad pen, on slightly noisy paper. The typefaces ship inside matplotlib.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm import tqdm

VERSION = 1
"""Count this up whenever the same seed would no longer draw the same images."""

SIZE = 28  # pixels along one side of an image
GLYPH_SIZE = 56  # the same for the glyph it is sampled from: twice as fine
BATCH = 1000

# Typefaces with ordinary digits: no bold ones (the pen varies), no zero with a dot in it.
FONTS = (
    "DejaVuSans",
    "DejaVuSans-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)
PEN_WIDTHS = (0, 1, 2, 3)  # added on each side of a stroke, in pixels of a glyph drawn at four times GLYPH_SIZE


def draw_digits(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random digits.

    The outcome depends on ``seed`` alone, not on the number of threads, nor on ``samples``: fewer samples are the
    first ones of more. Takes about 0.1 ms a sample.

    Returns:
        Images (samples, 28, 28) uint8, white on black, and their labels (samples,) uint8.
    """
    glyphs = draw_glyphs()
    generator = torch.Generator().manual_seed(seed)
    images = torch.empty(samples, SIZE, SIZE, dtype=torch.uint8)
    labels = torch.empty(samples, dtype=torch.uint8)
    with _one_thread(), tqdm(total=samples, unit="digits", disable=None, leave=False) as progress:
        for start in range(0, samples, BATCH):
            wanted = min(BATCH, samples - start)
            digit, drawn = _draw_batch(glyphs, generator)
            labels[start : start + wanted] = digit[:wanted]
            images[start : start + wanted] = drawn[:wanted]
            progress.update(wanted)
    return images, labels


def draw_glyphs() -> torch.Tensor:
    """Draw every digit in every typeface with every pen, centred and as high as MNIST's digits are.

    Returns:
        Ink in 0..1, slightly blurred, (10, typefaces x pens, 56, 56) float32.
    """
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), size=200) for name in FONTS]
    glyphs = [
        [_draw_glyph(str(digit), font, width) for font in fonts for width in PEN_WIDTHS] for digit in range(10)
    ]
    return torch.from_numpy(np.array(glyphs, dtype=np.float32) / 255)


def _draw_glyph(digit: str, font: ImageFont.FreeTypeFont, pen_width: int) -> np.ndarray:
    """Draw one digit, its ink 20/28 of the side high as in MNIST, uint8 (56, 56)."""
    side = 4 * GLYPH_SIZE
    left, top, right, bottom = font.getbbox(digit)
    scale = side * 18 / SIZE / (bottom - top)
    ink = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(ink).text((-left, -top), digit, font=font, fill=255)
    ink = ink.resize((round(ink.width * scale), round(ink.height * scale)), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (side, side))
    canvas.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    broad = canvas.filter(ImageFilter.MaxFilter(4 * pen_width + 1))
    return np.asarray(broad.filter(ImageFilter.GaussianBlur(7)).resize((GLYPH_SIZE, GLYPH_SIZE), Image.Resampling.BOX))


def _draw_batch(glyphs: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``BATCH`` digits: labels (BATCH,) int64 and images (BATCH, 28, 28) uint8."""

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(BATCH, *shape).uniform_(low, high, generator=generator)

    digit = torch.randint(10, (BATCH,), generator=generator)
    style = torch.randint(glyphs.shape[1], (BATCH,), generator=generator)
    places = _affine(uniform) + _wobble(uniform)
    ink = F.grid_sample(glyphs[digit, style, None], places, align_corners=False)[:, 0]
    # Ink fades in over a short range of the blurred glyph; where that range begins varies the breadth of the stroke.
    ink = (ink - uniform(0.15, 0.35, 1, 1)) * uniform(1.8, 3.5, 1, 1)
    ink = ink.clamp_(0, 1) * uniform(0.75, 1.0, 1, 1)
    noise = torch.randn(ink.shape, generator=generator)
    ink += noise * uniform(0.0, 0.12, 1, 1)
    return digit, ink.clamp_(0, 1).mul_(255).round_().to(torch.uint8)


def _affine(uniform) -> torch.Tensor:
    """Where in its glyph each pixel looks after turn, slant, stretch and shift: (BATCH, 28, 28, 2) in -1..1."""
    turn, slant = uniform(-0.3, 0.3), uniform(-0.35, 0.35)
    width, height = uniform(0.7, 1.15), uniform(0.8, 1.12)
    cos, sin = turn.cos(), turn.sin()
    # Inverse of: stretch, then slant, then turn
    matrix = torch.stack(
        [
            torch.stack([(cos + slant * sin) / width, (sin - slant * cos) / width, uniform(-0.12, 0.12)], dim=1),
            torch.stack([-sin / height, cos / height, uniform(-0.12, 0.12)], dim=1),
        ],
        dim=1,
    )
    return F.affine_grid(matrix, [BATCH, 1, SIZE, SIZE], align_corners=False)


def _wobble(uniform) -> torch.Tensor:
    """A smooth random displacement of each pixel: a few waves along x times y, (BATCH, 28, 28, 2)."""
    position = (torch.arange(SIZE) + 0.5) / SIZE
    waves = torch.stack([torch.cos(math.pi * k * position) for k in range(5)])
    surface = torch.einsum("ay,bx->abyx", waves, waves).reshape(25, SIZE * SIZE)
    amplitude = uniform(-0.05, 0.05, 2, 25)
    return (amplitude @ surface).reshape(BATCH, 2, SIZE, SIZE).permute(0, 2, 3, 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

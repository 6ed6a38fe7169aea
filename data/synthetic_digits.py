"""Synthetic digits that look handwritten, in place of MNIST where there is no network.

A digit starts as a glyph of a typeface and is then distorted at random: rotated, slanted, stretched, bent by smooth
waves, and drawn with a thin or a broad pen. The typefaces are part of matplotlib.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE = 28  # pixels along one side of an image
GLYPH_SIZE = 56  # the same for the glyph it is sampled from: twice as fine
BATCH = 1000
WAVES = 5  # of the smooth displacement, along each axis

# Typefaces with ordinary digits: no bold ones (the pen varies), none with a dot in its zero.
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
FONT_SIZE = 200  # pixels
PENS = (2, 4, 7)  # pixels added on each side of a stroke at that size


def generate_digits(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate random digits.

    On one machine and one thread the result depends on ``seed`` alone, not on ``samples``: fewer samples are the first
    ones of more. Other versions of the libraries may give other pixels.

    Returns:
        Images (samples, 28, 28) uint8, white (255) on black (0), and their labels (samples,) uint8 in 0..9.
    """
    glyphs = _draw_glyphs()
    generator = torch.Generator().manual_seed(seed)
    batches = [_generate_batch(glyphs, generator) for _ in range(0, samples, BATCH)]
    images, labels = (torch.cat(parts)[:samples] for parts in zip(*batches, strict=True))
    return images, labels.to(torch.uint8)


@cache
def _draw_glyphs() -> torch.Tensor:
    """Draw each digit in each typeface with each pen: ink in 0..1, (10, typefaces * pens, 56, 56) float32."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), FONT_SIZE) for name in FONTS]
    glyphs = [[_draw_glyph(digit, font, pen) for font in fonts for pen in PENS] for digit in "0123456789"]
    return torch.from_numpy(np.array(glyphs)).float() / 255


def _draw_glyph(digit: str, font: ImageFont.FreeTypeFont, pen: int) -> np.ndarray:
    """Draw one digit, centered, 19/28 of the side high, with soft edges: (56, 56) uint8."""
    left, top, right, bottom = font.getbbox(digit, stroke_width=pen)
    ink = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(ink).text((-left, -top), digit, font=font, fill=255, stroke_width=pen)

    side = 4 * GLYPH_SIZE
    scale = side * 19 / SIZE / ink.height
    ink = ink.resize((round(ink.width * scale), round(ink.height * scale)), Image.Resampling.BICUBIC)
    canvas = Image.new("L", (side, side))
    canvas.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    soft = canvas.filter(ImageFilter.GaussianBlur(6))
    return np.asarray(soft.resize((GLYPH_SIZE, GLYPH_SIZE), Image.Resampling.BOX))


def _generate_batch(glyphs: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate ``BATCH`` digits: images (BATCH, 28, 28) uint8 and labels (BATCH,) int64."""
    labels = torch.randint(len(glyphs), (BATCH,), generator=generator)
    styles = torch.randint(glyphs.shape[1], (BATCH,), generator=generator)
    places = _affine(generator) + _displacement(generator)
    ink = F.grid_sample(glyphs[labels, styles, None], places, align_corners=False)[:, 0]

    # Where on the soft edge the ink begins decides how broad the stroke is; how fast it rises decides how sharp it is.
    begin, rise, brightness = _uniform(generator, (0.15, 1.8, 0.8), (0.35, 3.5, 1.0))[:, :, None, None]
    ink = ((ink - begin) * rise).clamp(0, 1) * brightness
    return (ink * 255).round().to(torch.uint8), labels


def _affine(generator: torch.Generator) -> torch.Tensor:
    """Which place of its glyph (-1..1) each pixel shows, with stretch, slant, rotation, shift: (BATCH, 28, 28, 2)."""
    turn, slant, width, height, right, down = _uniform(
        generator, (-0.25, -0.3, 0.75, 0.85, -0.08, -0.08), (0.25, 0.3, 1.1, 1.1, 0.08, 0.08)
    )
    cos, sin = turn.cos(), turn.sin()  # turn: radians; the matrix is the inverse of stretch, then slant, then rotation
    across = [(cos - slant * sin) / width, (sin + slant * cos) / width, right]
    along = [-sin / height, cos / height, down]
    matrix = torch.stack(across + along, dim=1).view(BATCH, 2, 3)
    return F.affine_grid(matrix, [BATCH, 1, SIZE, SIZE], align_corners=False)


def _displacement(generator: torch.Generator) -> torch.Tensor:
    """A smooth random displacement of each pixel, a sum of low waves: (BATCH, 28, 28, 2)."""
    position = (torch.arange(SIZE) + 0.5) / SIZE
    waves = torch.cos(math.pi * torch.arange(WAVES)[:, None] * position)  # (WAVES, 28)
    surfaces = (waves[:, None, :, None] * waves[None, :, None, :]).view(WAVES**2, SIZE**2)
    amplitudes = 0.09 * (torch.rand(BATCH, 2, WAVES**2, generator=generator) - 0.5)
    return (amplitudes @ surfaces).view(BATCH, 2, SIZE, SIZE).permute(0, 2, 3, 1)


def _uniform(generator: torch.Generator, low: Sequence[float], high: Sequence[float]) -> torch.Tensor:
    """Draw a row of ``BATCH`` uniform numbers for each pair of limits: (len(low), BATCH)."""
    bottom, top = torch.tensor(low)[:, None], torch.tensor(high)[:, None]
    return bottom + (top - bottom) * torch.rand(len(low), BATCH, generator=generator)

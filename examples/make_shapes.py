"""Draw circles, crosses and squares as small images."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

rng = np.random.default_rng(0)
for name in ("circle", "cross", "square"):
    folder = Path("shapes") / name
    folder.mkdir(parents=True)
    for i in range(200):
        picture = Image.new("RGB", (48, 40), tuple(int(c) for c in rng.integers(0, 90, 3)))
        draw = ImageDraw.Draw(picture)
        x, y, r = (int(v) for v in (rng.integers(14, 34), rng.integers(14, 26), rng.integers(6, 12)))
        colour = tuple(int(c) for c in rng.integers(120, 256, 3))
        if name == "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif name == "square":
            draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        else:
            draw.line((x - r, y - r, x + r, y + r), fill=colour, width=3)
            draw.line((x - r, y + r, x + r, y - r), fill=colour, width=3)
        picture.save(folder / f"{i:03}.png")

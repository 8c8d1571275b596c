"""Draw windows of three activities by four people."""

import numpy as np

rng = np.random.default_rng(0)
rows, steps = 960, 64
recording = np.arange(rows) // 4  # four windows each
activity = recording % 3
person = recording // 3 % 4
wave = np.sin(2 * np.pi * (activity[:, None] + 1) * np.arange(steps) / steps + rng.uniform(0, 6, (rows, 1)))
x = np.stack([wave, 5 + 3 * wave], axis=1) + (0.3 + 0.1 * person[:, None, None]) * rng.standard_normal((rows, 2, steps))
np.savez(
    "sensors.npz",
    x=x.astype("float32"),
    y=np.array(["walk", "run", "sit"])[activity],
    client=np.array(["ada", "bob", "cleo", "dan"])[person],
    group=recording,
)

"""Draw patients of four hospitals."""

import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
rows = 800
hospital = rng.choice(["east", "north", "south", "west"], rows, p=[0.4, 0.3, 0.2, 0.1])
ill = rng.random(rows) < np.where(hospital == "west", 0.6, 0.3)
table = pd.DataFrame(
    {
        "age": rng.normal(45 + 15 * ill, 12).round(),
        "pressure": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(120 + 20 * ill, 15).round()),
        "smoker": rng.random(rows) < 0.2 + 0.3 * ill,
        "blood": rng.choice(["0", "A", "AB", "B"], rows),
        "diagnosis": np.where(ill, "ill", "well"),
        "hospital": hospital,
        "person": np.arange(rows) // 2,
    }
)
table.to_csv("patients.csv", index=False)

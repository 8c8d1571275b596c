"""Save a small data set of the library `datasets`."""

import numpy as np
from datasets import Array2D, ClassLabel, Dataset, Features, Value

rng = np.random.default_rng(0)
person, activity = np.arange(240) % 4, np.arange(240) // 4 % 2
signal = rng.normal(size=(240, 3, 32)) + activity[:, None, None] * np.sin(np.arange(32))
Dataset.from_dict(
    {
        "signal": signal.astype("float32"),
        "activity": activity,
        "person": np.array(["ada", "bob", "cleo", "dan"])[person],
    },
    features=Features(
        {
            "signal": Array2D((3, 32), "float32"),
            "activity": ClassLabel(names=["rest", "walk"]),
            "person": Value("string"),
        }
    ),
).save_to_disk("waves")

"""The bound on what a client changes."""

from __future__ import annotations

import numpy as np
import pytest

from fedapp.transport.clipping import clip_update


@pytest.mark.parametrize("bound", [0.1, 1.0, 3.0, 100.0])
def test_an_update_is_no_longer_than_the_bound(bound: float) -> None:
    rng = np.random.default_rng(1)
    received = {"a": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=5).astype(np.float32)}
    sent = {n: (a + rng.normal(size=a.shape)).astype(np.float32) for n, a in received.items()}
    means = {"lar": rng.normal(size=(2, 2)).astype(np.float32)}
    new, norm = clip_update({**sent, **means}, received, bound)
    before = np.concatenate([(sent[n] - received[n]).ravel() for n in sent]).astype(np.float64)
    after = np.concatenate([(new[n] - received[n]).ravel() for n in sent]).astype(np.float64)
    assert norm == pytest.approx(np.linalg.norm(before), rel=1e-5)
    assert np.linalg.norm(after) == pytest.approx(min(bound, norm), rel=1e-5)
    assert np.allclose(after * np.linalg.norm(before), before * np.linalg.norm(after), atol=1e-4)
    assert new["lar"] is means["lar"] and all(new[n].dtype == np.float32 for n in sent)

"""Columns of the result tables from clients' sums and counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedapp.learning.metrics import client_row, mean, std, summarise, tidy


def test_mean_and_std_skip_nan_and_divide_by_the_number_of_values() -> None:
    assert mean([1.0, math.nan, 3.0]) == 2.0
    assert std([1.0, math.nan, 3.0]) == 1.0, "ddof is 0"
    assert std([5.0]) == 0.0
    for function in (mean, std):
        assert math.isnan(function([])) and math.isnan(function([math.nan]))


METRICS = {
    "num-examples": 30, "received-total": 8, "received-correct": 6, "received-loss-sum": 4.0, "received-balanced": 0.7,
    "trained-total": 0, "trained-correct": 0, "trained-loss-sum": 0.0, "train-loss": 0.3, "steps": 12,
    "bytes-up": 2600, "train-seconds": 1.5, "seconds": 2.5,
}  # fmt: skip


def test_a_clients_row_by_hand() -> None:
    row = client_row(METRICS, ["received", "trained"])
    expected = {
        "num_samples": 30, "received_correct": 6, "received_total": 8, "received_accuracy": 0.75, "received_loss": 0.5,
        "received_balanced": 0.7, "trained_correct": 0, "trained_total": 0, "train_loss": 0.3, "steps": 12,
        "bytes_up": 2600, "train_seconds": 1.5, "client_seconds": 2.5,
    }  # fmt: skip
    nan = {"trained_accuracy", "trained_loss", "trained_balanced"}
    assert row.keys() == expected.keys() | nan
    assert {name: value for name, value in row.items() if name not in nan} == expected
    assert all(math.isnan(row[name]) for name in nan), "no test images: no score"


def test_what_a_client_did_not_report_is_nan_and_its_bytes_are_zero() -> None:
    row = client_row({}, ["received"])
    assert row.pop("bytes_up") == 0
    assert len(row) == 10 and all(math.isnan(value) for value in row.values())


def test_pooled_scores_believe_a_test_count_up_to_a_limit() -> None:
    """Of 8 test images with 1 right only 2 count, with a quarter of one: (3 + 0.25) / (4 + 2), for a limit of 2."""
    rows = [client_row({"received-total": t, "received-correct": c}, ["received"]) for t, c in ((2, 2), (8, 1))]
    rows += [{}, client_row({"received-total": 2, "received-correct": 1}, ["received"])]
    assert summarise(rows, ["received"], most=2)["received_accuracy_pooled"] == pytest.approx(3.25 / 6)
    for most in (8, math.inf):
        assert summarise(rows, ["received"], most=most)["received_accuracy_pooled"] == 4 / 12


def test_a_rounds_averages_by_hand() -> None:
    """Accuracies 3/4 and 1/8: unweighted 0.4375, pooled 4/12. A client without test images does not count."""
    rows = [
        client_row({"received-total": t, "received-correct": c, "received-loss-sum": s, "received-balanced": b,
                    "train-loss": loss}, ["received"])
        for t, c, s, b, loss in ((4, 3, 2.0, 0.5, 1.0), (8, 1, 12.0, 0.1, 3.0), (0, 0, 0.0, math.nan, 5.0))
    ]  # fmt: skip
    found = summarise(iter(rows), ["received"])
    assert found == {
        "received_accuracy": pytest.approx(0.4375),
        "received_accuracy_std": pytest.approx(0.3125),
        "received_accuracy_pooled": pytest.approx(4 / 12),
        "received_loss": pytest.approx(1.0),
        "received_balanced": pytest.approx(0.3),
        "train_loss": pytest.approx(3.0),
    }


def test_a_round_without_replies_has_no_scores() -> None:
    found = summarise([], ["received", "trained"])
    assert len(found) == 11 and all(math.isnan(value) for value in found.values())


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, None), (np.nan, None), (2.0, 2), (2, 2), (-3.0, -3), (2.5, 2.5), (2.0**53, 2.0**53), (1e300, 1e300)],
)
def test_numbers_for_json(value: float, expected: float | int | None) -> None:
    found = tidy(value)
    assert found == expected and type(found) is type(expected)


def test_validation_further_metrics_and_the_methods_own_numbers_have_columns() -> None:
    told = {"received-validation-correct": 3, "received-validation-total": 4, "received-auc": 0.5, "beta-mean": 0.2}
    rows = [
        client_row({**told, "received-auc": auc}, ["received"], validation=True, columns=["beta-mean"], scores=["auc"])
        for auc in (0.5, 0.75)
    ]
    assert [r["received_auc"] for r in rows] == [0.5, 0.75]
    assert rows[0]["received_validation"] == 0.75 and rows[0]["beta_mean"] == 0.2 and "beta-mean" not in rows[0]
    found = summarise(rows, ["received"], columns=["beta-mean"], scores=["auc"])
    assert found["received_auc"] == 0.625 and found["received_validation"] == 0.75 and found["beta_mean"] == 0.2

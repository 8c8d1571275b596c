"""A site's choice between its own head and that of all sites with its class shares: the rule, and the harm it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedapp
from clients.choice import CHOSEN, held_out
from fedapp import registry
from fedapp.config import from_flat
from fedapp.engines import local, runner
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.method import Payload, Reply
from fedapp.tasks import simulated
from strategies.lda import ALONE, LDAHParams
from tests.closedform import server
from tests.handmade import one_batch_task, refusal
from tests.test_features import picture_body
from tests.test_personal_heads import B, W, heads, on_features, union

Tiny = Callable[..., RunResult]


# ---- held-out rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "count"), [(7, 0), (8, 4), (19, 4), (20, 4), (100, 20), (104, 20)])
def test_a_fifth_of_the_rows_is_held_out(rows: int, count: int) -> None:
    found = held_out(rows, None, torch.Generator().manual_seed(0))
    assert found.shape == (rows,) and int(found.sum()) == count
    assert torch.equal(found, held_out(rows, None, torch.Generator().manual_seed(0)))


def test_whole_groups_are_held_out() -> None:
    groups = np.repeat(np.arange(30), [5, 7] * 15)
    found = held_out(len(groups), groups, torch.Generator().manual_seed(1)).numpy()
    assert 0 < found.sum() <= len(groups) // 5 and found.sum() > len(groups) // 5 - 5
    assert all(len(set(found[groups == g])) == 1 for g in range(30))
    assert not held_out(40, np.zeros(40, int), torch.Generator().manual_seed(1)).any(), "one group cannot be parted"


def test_a_simulation_and_a_node_know_the_groups_of_their_rows(tmp_path: Path) -> None:
    place = union(tmp_path / "f.npz", [260, 240])
    with np.load(place) as found:
        arrays = dict(found)
    groups = np.arange(500) // 6 * 2 + (arrays["split"] == "test")
    np.savez(place, **arrays, group=groups)
    config = local.effective(
        {"dataset": "npz", "data-dir": str(place), "method": "lda", "model": "identity", "clients": 5, "min-samples": 2}
    )
    for client in range(5):
        task = simulated.simulated_task(config, client, 5, torch.device("cpu"))
        mine = (arrays["client"] == client) & (arrays["split"] == "train")
        kept = np.unique(task.extras["groups"], return_inverse=True)[1]
        np.testing.assert_array_equal(kept, np.unique(groups[mine], return_inverse=True)[1])


# ---- the rule --------------------------------------------------------------------------------------------------------


def worlds(path: Path, sites: int = 6, each: int = 240, seed: int = 3, **shift: float) -> Path:
    """Write features of sites that all have all classes; with `turn` each site's classes are a world of its own.

    `darker` is the largest change of a site's scale, `moved` of its offset, both drawn for each site.
    """
    rng, classes, width = np.random.default_rng(seed), 4, 10
    centres = 1.3 * rng.normal(size=(classes, width))
    xs, ys, owners = [], [], []
    for site in range(sites):
        y = rng.choice(classes, each, p=rng.dirichlet(np.full(classes, 2.0)))
        own = centres[np.roll(np.arange(classes), site)] if shift.get("turn") else centres
        x = own[y] + rng.normal(size=(each, width))
        x = x * np.exp(shift.get("darker", 0.0) * rng.normal(size=width)) + shift.get("moved", 0.0) * rng.normal(
            size=width
        )
        xs, ys, owners = [*xs, x], [*ys, y], [*owners, np.full(each, site)]
    split = np.where(np.arange(sites * each) % 3 == 2, "test", "train")
    x = np.concatenate(xs).astype(np.float32)
    np.savez(path, x=x, y=np.concatenate(ys), client=np.concatenate(owners), split=split)
    return path


@pytest.mark.full
@pytest.mark.parametrize("text", ["lda", "fed3r", "fedncm metric=euclidean", "fedcof", "fed3r base=fedavg"])
def test_sites_of_one_source_take_the_federated_head_and_worlds_of_their_own_their_own(
    text: str, tmp_path: Path, tiny: Tiny, replies: list[tuple[str, Reply]], capsys: pytest.CaptureFixture[str]
) -> None:
    alike = on_features(tiny, worlds(tmp_path / "a.npz", each=60), f"{text} choose=true")
    kinds = [kind for kind, _ in replies]
    gains = [reply.arrays["sums/gain"] for kind, reply in replies if kind == "query.choice"]
    assert len(gains) == 6 and all(g.shape == (1,) and g == np.rint(g) for g in gains)
    assert {"query.kept", "query.kept_losses", "query.choice", "query.sums", "query.losses"} <= set(kinds)
    said = alike.summary["choice"]
    assert said["default"] == "federated" and said["own_ahead"] == int(sum(gains)[0]) <= 0
    assert said["federated"] >= 5 and said["own"] + said["federated"] == 6
    apart = on_features(tiny, worlds(tmp_path / "b.npz", turn=1.0), f"{text} choose=true")
    assert (apart.summary["choice"]["own"], apart.summary["choice"]["default"]) == (6, "own")
    for name in ("bytes_up_query.kept", "bytes_up_query.sums", "bytes_up_query.choice"):
        assert apart.summary[name] > 0
    capsys.readouterr()
    runner.print_summary(apart.summary)
    shown = " ".join(capsys.readouterr().out.split())
    assert "chosen by held-out rows: their own head by 6 of 6 clients" in shown and "default: own" in shown


def discriminant(z: np.ndarray, y: np.ndarray, classes: int, g: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """LDA with equal classes, written out: weights, bias, and which classes have rows."""
    seen = np.bincount(y, minlength=classes) > 0
    means = np.stack([z[y == c].mean(axis=0) if seen[c] else np.zeros(z.shape[1]) for c in range(classes)])
    inside = (z - means[y]).T @ (z - means[y]) / (len(y) - seen.sum())
    inside = (1 - g) * inside + g * np.trace(inside) / len(inside) * np.eye(len(inside))
    w = np.linalg.solve(inside, means.T).T
    return w, -0.5 * (w * means).sum(axis=1), seen


def test_the_own_head_is_the_discriminant_of_the_own_rows(tmp_path: Path, tiny: Tiny) -> None:
    """The stored model of a site that keeps its own: g = .3, its own class shares, from all of its training rows."""
    place = worlds(tmp_path / "b.npz", turn=1.0)
    shared, own = heads(on_features(tiny, place, "lda choose=true"))
    with np.load(place) as found:
        mine = (found["split"] == "train") & (found["client"] == 2)
        z, y = found["x"][mine].astype(float), found["y"][mine]
    w, b, seen = discriminant(z, y, 4, ALONE)
    assert seen.all() and not np.allclose(own[2][W], shared[W])
    factor = own[2][W][0, 0] / w[0, 0]
    np.testing.assert_allclose(own[2][W], factor * w, rtol=1e-4, atol=1e-5)
    p = (np.bincount(y) + 3 / 4) / (len(y) + 3)
    np.testing.assert_allclose(np.ptp(own[2][B] - factor * b - np.log(p)), 0, atol=1e-3)
    logits = torch.from_numpy(z @ w.T + b)
    losses = [float(torch.nn.functional.cross_entropy(s * factor * logits, torch.from_numpy(y))) for s in (0.8, 1, 1.2)]
    assert losses[1] == min(losses), "the factor is the best on the own rows"


@pytest.mark.parametrize(
    ("gain", "apart", "rows", "default", "own"),
    [
        (5, 25, 100, False, False), (6, 25, 100, False, True), (-6, 25, 100, True, False), (-5, 25, 100, True, True),
        (1, 1, 100, False, False), (2, 2, 100, False, True), (9, 9, 19, False, False), (9, 9, 20, False, True),
        (-9, 9, 19, True, True),
        (0, 0, 100, True, True), (0, 0, 100, False, False),
    ],
)  # fmt: skip
def test_a_site_deviates_only_for_more_rows_than_noise(
    gain: int, apart: int, rows: int, default: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, hparams = registry.configured("lda", "choose=true base=none")
    task = dataclasses.replace(one_batch_task(rows, 3), y_train=torch.arange(rows) % 3)
    client = method.client(task, method, hparams)
    monkeypatch.setattr(client, "compared", lambda prior, scalars: (gain, apart))
    monkeypatch.setattr(
        client, "own_head", lambda exchange: [np.full(p.shape, 7.0) for p in client.model.head.parameters()]
    )
    model = client.build_model(task.spec(3), hparams)
    common = {n: a.detach().numpy() for n, a in model.state_dict().items()} | {"prior/shares": np.full(3, 1 / 3)}
    scalars = {"personal": True, "prior-strength": 0.0, "own-default": default}
    metrics = client.evaluate_round(Payload(common=common, scalars=scalars), 1)
    assert metrics[CHOSEN] == own
    assert bool((client.model.head.weight == 7).all()) is own


@pytest.mark.parametrize(
    ("gain", "words"),
    [(3.0, ""), (-5.0, ""), (0.5, "number of rows"), (np.inf, "number of rows"), (6.0, "from a client of 10")],
)
def test_an_answer_that_is_no_number_of_held_out_rows_is_dropped(gain: float, words: str) -> None:
    strategy, _ = server("lda", "choose=true")
    problem = refusal(strategy, {}, Reply(0, 10, {"sums/gain": np.array([gain])}, {}, kind="query.choice")) or ""
    assert words in problem and bool(words) is bool(problem)


def test_a_choice_is_refused_with_noise() -> None:
    values = {"method": "fed3r", "dp": "example", "method-args": "base=none choose=true", "normalise": "none"}
    with pytest.raises(BadRequest, match="choose=true sends exact numbers"):
        from_flat(values)


def test_a_choice_sends_sums_whose_difference_is_of_few_rows() -> None:
    with pytest.raises(BadRequest, match="leave min_count out"):
        registry.configured("lda", "choose=true min_count=3")


def test_choose_implies_the_shares_and_a_fitted_factor() -> None:
    found = registry.configured("lda", "choose=true base=fedavg")[1]
    assert isinstance(found, LDAHParams) and found.personal and found.scale == "fit"


# ---- harm ------------------------------------------------------------------------------------------------------------


def alone(text: str, place: Path, sites: int) -> np.ndarray:
    """Accuracies of each site's own head on its test rows, in NumPy; of ridge with the best of three penalties."""
    with np.load(place) as found:
        x, y, site, train = found["x"].astype(float), found["y"], found["client"].astype(int), found["split"] == "train"
    right = []
    for k in range(sites):
        mine, test = train & (site == k), ~train & (site == k)
        w, b, seen = discriminant(x[mine], y[mine], 4, ALONE)
        scores = [np.where(seen, x[test] @ w.T + b + np.log(np.bincount(y[mine], minlength=4) + 0.75), -np.inf)]
        if text == "fed3r":
            h, full = (np.column_stack([x[rows], np.ones(rows.sum())]) for rows in (mine, test))
            scores = [
                full @ np.linalg.solve(h.T @ h + lam * np.eye(11), h.T @ np.eye(4)[y[mine]]) for lam in (1, 10, 99)
            ]
        right.append(max((s.argmax(axis=1) == y[test]).mean() for s in scores))
    return 100 * np.array(right)


def pictures(path: Path, sites: int, seed: int, each: int = 240) -> Path:
    """Write features of small pictures by a body; a third of the sites each has them darker, blurred, half as wide."""
    rng = np.random.default_rng(seed)
    tiles, shares = rng.normal(size=(4, 4, 4, 3)), rng.dirichlet(np.full(4, 2.0), sites)
    y = np.concatenate([rng.choice(4, each, p=share) for share in shares])
    site = np.repeat(np.arange(sites), each)
    x = 127 + 20 * np.tile(tiles, (1, 4, 4, 1))[y] + 60 * rng.normal(size=(len(y), 16, 16, 3))
    x[site % 3 == 0] *= 0.5
    blurred = x[site % 3 == 1]
    x[site % 3 == 1] = (blurred + np.roll(blurred, 1, axis=1) + np.roll(blurred, 1, axis=2)) / 3
    x[site % 3 == 2] = x[site % 3 == 2][:, ::2, ::2].repeat(2, axis=1).repeat(2, axis=2)
    raw = path.with_name(f"{path.stem}-raw.npz")
    split = np.where(np.arange(len(y)) % 3 == 2, "test", "train")
    np.savez(raw, x=x.clip(0, 255).astype(np.uint8), y=y, client=site, split=split)
    body = picture_body(path.with_suffix(".onnx"), width=10, side=16)
    fedapp.features(raw, body, path, size=16, mean=[127.0], std=[128.0], workers=1)
    return path


SHIFTS = {"shifted": {"darker": 0.5, "moved": 1.5}, "worlds": {"turn": 1.0}, "alike": {}, "pictures": {}}


@pytest.mark.full
@pytest.mark.parametrize("text", ["lda", "fed3r"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_the_choice_harms_no_site_by_more_than_the_margin(text: str, shift: str, tmp_path: Path, tiny: Tiny) -> None:
    """Harm is the mean over sites, then over seeds, of min(0, accuracy - that of the own head).

    The margin is max(min(1, (100 - own) / 10), 100 / test rows of a site) points. Where sites are shifted against each
    other, the federated head with shares does more harm than that.
    """
    harm: dict[str, list[float]] = {"choose": [], "personal": []}
    margins = []
    for seed in range(3):
        make = pictures if shift == "pictures" else worlds
        place = make(tmp_path / f"{seed}.npz", sites=8, seed=seed, **SHIFTS[shift])
        reference = alone(text, place, 8)
        margins.append(max(min(1.0, (100 - reference.mean()) / 10), 100 / 80))
        for option, found in harm.items():
            run = on_features(tiny, place, f"{text} {option}=true")
            got = 100 * run.final.sort_values("client")["received_accuracy"].to_numpy()
            found.append(float(np.minimum(0, got - reference).mean()))
    assert np.mean(harm["choose"]) > -np.mean(margins)
    assert bool(np.mean(harm["personal"]) < -np.mean(margins)) is (shift != "alike")


def test_the_sum_over_sites_is_all_that_the_server_needs(tmp_path: Path, tiny: Tiny) -> None:
    place = worlds(tmp_path / "f.npz", darker=0.5, moved=0.5)
    plain, hidden = (on_features(tiny, place, "lda choose=true", secure_sum=s).summary["choice"] for s in (False, True))
    assert plain == hidden and plain["own_ahead"] != 0

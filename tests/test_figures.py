"""Figures: what they are computed from against slow or independent computations, and how they are written."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from fedapp.engines.local import run
from fedapp.results import analysis, figures, report
from fedapp.results.analysis import Unavailable
from fedapp.results.answers import answers_of
from fedapp.results.figures import gains, maps, pieces, plots, scores, style, words
from fedapp.results.figures.gallery import Job
from fedapp.results.runs import PAIRED, Comparison, RunResult, groups_of, read_comparison, read_run, varying
from fedapp.tasks import simulated
from fedapp.transport import checkpoint
from tests import madeup
from tests.conftest import SMALL
from tests.handmade import context, reply


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


def files(data: RunResult, client: int) -> list[Path]:
    return sorted((data.out / "state" / "run" / str(client)).glob("*.safetensors"))


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_saved_partition(cw: RunResult) -> None:
    from fedapp.data.partitions import Partition

    partition = Partition.load(cw.out / "partition.npz")
    labels = simulated.federated(analysis.config_of(cw), 4).dataset.pool_labels
    slow = np.zeros((4, 10), int)
    for k, client in enumerate(partition.clients):
        for i in client.train:
            slow[k, labels[i]] += 1
    np.testing.assert_array_equal(cw.counts, slow)
    np.testing.assert_allclose(analysis.label_shares(cw), slow / slow.sum(axis=1, keepdims=True))


def test_a_moved_run_directory_is_read_where_it_lies(cw: RunResult, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(cw.out, moved)
    here, there = analysis.client_arrays(cw), analysis.client_arrays(read_run(moved))
    assert here.keys() == there.keys()
    for client, (server_round, arrays) in here.items():
        assert there[client][0] == server_round == 3
        np.testing.assert_array_equal(there[client][1]["model/head.weight"], arrays["model/head.weight"])


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_head_norms_are_those_of_the_stored_models(cw: RunResult) -> None:
    ids, norms = analysis.head_norms(cw)
    assert ids == [0, 1, 2, 3]
    for k in ids:
        weight = load_file(files(cw, k)[-1])["model/head.weight"]
        slow = [sum(float(w) ** 2 for w in row) ** 0.5 for row in weight]
        np.testing.assert_allclose(norms[k], slow, rtol=1e-6)


def test_head_norms_never_travel(cw: RunResult) -> None:
    for path in (cw.out / "checkpoint").glob("*.safetensors"):
        assert not any("norm" in name for name in load_file(path))
    assert not any("norm" in c for c in cw.clients.columns)


def test_who_learns_from_whom_is_what_the_server_hands_out_next(cw: RunResult) -> None:
    """A times the uploads, in plain loops, is the blend of class models that the checkpoint holds."""
    ids, matrix, _ = analysis.who_learns_from_whom(cw)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    uploads = [load_file(files(cw, k)[-1])["model/head.weight"].astype(np.float64) for k in ids]
    found = checkpoint.latest(cw.out / "checkpoint")
    assert found is not None
    state = found[1]
    rows = [state["rows"][i]["head.weight"].astype(np.float64) for i in range(len(state["rows"]))]
    for i in ids:
        handed_out = np.zeros_like(uploads[0])
        for j in range(10):  # theta_i = sum_j p~_ij g_j,  g_j = sum_k q_kj theta_k
            for k in range(len(rows)):
                handed_out += state["pt"][i][j] * state["q"][k, j] * rows[k]
        mine = sum(matrix[i, k] * uploads[k] for k in range(len(ids)))
        np.testing.assert_allclose(mine, handed_out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("args", ["", "tau=0.5"])
def test_with_part_of_the_clients_the_weights_are_those_of_the_models_in_the_blend(args: str, folder: Path) -> None:
    """cwFedAvg with two of four clients a round, and with classes that keep the model of an earlier round.

    Every model that was ever uploaded is a point: the number of its client and round. So A times these points, by the
    rounds in which they count, must be what `send` hands out; here the strategy itself runs, without training.
    """
    from clients.cwfedavg import CwFedAvgHParams
    from fedapp.method import ServerState
    from strategies.cwfedavg import METHOD, CwFedAvg

    tau = float(args.partition("=")[2] or 0)
    strategy = CwFedAvg(METHOD, CwFedAvgHParams(layers="all", tau=tau))
    rng = np.random.default_rng(3)
    initial = {n: np.zeros(s, np.float32) for n, s in (("features.weight", (2, 2)), ("head.weight", (3, 2)))}
    state: ServerState = strategy.init(context(initial, clients=4, num_classes=3))
    assert strategy.blend(state, {}) is None
    sent: dict[int, dict[str, np.ndarray]] = {}
    for server_round, here in enumerate(((0, 1, 2, 3), (1, 3)), 1):
        replies = []
        for c in here:
            rare = 1.0 if server_round == 1 else 0.01  # class 2 in round 2
            head = (rng.random((3, 2)) + 1) * np.array([[1.0], [1.0], [rare]])
            sent[c] = {"features.weight": np.full((2, 2), c, np.float32), "head.weight": head.astype(np.float32)}
            replies.append(reply(c, 10 * (c + 1), sent[c]))
        state = strategy.aggregate(state, server_round, iter(replies))
    found = strategy.blend(state, {})
    assert found is not None
    ids, matrix, _ = found
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    assert ids == [0, 1, 2, 3] and bool(matrix[:, [0, 2]].any()) is bool(tau), "only a guarded class keeps old models"
    for k, c in enumerate(ids):
        handed_out = strategy.send(state, 3, c).all()["features.weight"]
        np.testing.assert_allclose(handed_out, matrix[k] @ np.arange(4.0), rtol=1e-5)


def after(folder: Path, method: str, **more: Any) -> tuple[RunResult, dict[str, Any]]:
    out = more.get("out", folder / method)
    run(**{**SMALL, "rounds": 2, "method": method, "out": out, **more})
    found = checkpoint.latest(out / "checkpoint")
    assert found is not None
    return read_run(out), found[1]


@pytest.mark.parametrize(
    ("method", "args"), [("ifca", ""), ("ifca", "weighting=uniform"), ("cfl", ""), ("cfl", "weighting=samples")]
)
def test_members_of_a_cluster_learn_from_each_other_as_they_are_averaged(method: str, args: str, folder: Path) -> None:
    data, state = after(folder, method, method_args=args, out=folder / f"{method}-{args}")
    ids, matrix, how = analysis.who_learns_from_whom(data)
    by_samples = (args == "weighting=samples") or (method == "ifca" and not args)
    sizes = data.counts.sum(axis=1) if by_samples else np.ones(4)
    assert ("by sample counts" in how) is by_samples
    chosen = state["chosen"] if method == "ifca" else {c: j for j, m in state["members"].items() for c in m}
    for i, j in itertools.product(ids, ids):
        total = sum(sizes[k] for k in ids if chosen[k] == chosen[i])
        assert matrix[i, j] == pytest.approx(sizes[j] / total if chosen[i] == chosen[j] else 0)


def test_attention_times_uploads_is_what_fedamp_hands_out(folder: Path) -> None:
    data, state = after(folder, "fedamp")
    ids, matrix, _ = analysis.who_learns_from_whom(data)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    uploads = [load_file(files(data, k)[-1])["model/head.bias"].astype(np.float64) for k in ids]
    for i in ids:
        mine = sum(matrix[i, k] * uploads[k] for k in ids)
        np.testing.assert_allclose(mine, state["mixed"][i]["head.bias"], rtol=1e-4, atol=1e-6)


def test_tables_of_fedfomo_and_ktpfl_by_rows(folder: Path) -> None:
    data, state = after(folder, "fedfomo")
    ids, matrix, _ = analysis.who_learns_from_whom(data)
    for i in range(len(ids)):
        row = [max(0.0, v) for v in state["P"][i]]
        expected = [v / sum(row) for v in row] if sum(row) else [float(i == j) for j in range(len(ids))]
        np.testing.assert_allclose(matrix[i], expected)
    data, state = after(folder, "ktpfl")
    ids, matrix, _ = analysis.who_learns_from_whom(data)
    assert ids == state["ids"]
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    np.testing.assert_allclose(matrix * state["c"].sum(axis=1)[:, None], state["c"])


def test_without_weights_the_reason_is_told(mixed: RunResult) -> None:
    with pytest.raises(Unavailable, match="fedclassavg keeps no weights") as e:
        analysis.who_learns_from_whom(mixed)
    assert e.value.command == "fedapp run --method cwfedavg ... (or ktpfl, fedamp, fedfomo, cfl, ifca, fedpac)"


# ---- several runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Comparison:
    base = {**SMALL, "clients": 3, "rounds": 1}
    for alpha, seed in itertools.product((0.3, 3.0), (0, 1)):
        run(**{**base, "method": "local", "alpha": alpha, "seed": seed, "out": folder / "sweep" / f"a{alpha}-s{seed}"})
    for lam in (0, 10):
        out = folder / "sweep" / "deep" / f"lam{lam}"
        run(**{**base, "method": "cwfedavg", "method_args": f"lam={lam}", "alpha": 0.3, "out": out})
    return read_comparison(folder / "sweep")


def test_settings_and_seeds_are_told_apart(sweep: Comparison) -> None:
    assert len(sweep.runs) == 6
    assert set(varying(sweep.runs)) == {"alpha", "method-args"}
    groups = {tuple(s.items()): len(m) for s, m in groups_of(sweep.runs)}
    assert groups == {(("alpha", 0.3),): 4, (("alpha", 3.0),): 2}


def test_a_sweep_shows_mean_and_spread_over_seeds(sweep: Comparison) -> None:
    runs = {"local": [r for r in sweep.runs if r.method == "local"]}
    curve = scores._sweep_lines(runs, lambda r: float(r.flat["alpha"]))["trained, after local training"][0]
    for i, alpha in enumerate((0.3, 3.0)):
        last = [
            r.summary["accuracy"]["trained"]["last"]
            for r in sweep.runs
            if r.method == "local" and r.flat["alpha"] == alpha
        ]
        assert curve.x[i] == alpha
        assert curve.mean[i] == pytest.approx(np.mean(last))
        assert curve.spread is not None
        assert curve.spread[i] == pytest.approx(abs(last[0] - last[1]) / 2**0.5)


def test_hyperparameters_of_a_method_make_a_figure_with_the_distance(sweep: Comparison) -> None:
    ids = [d.id for d in scores.hyperparameters(sweep.runs)]
    assert ids == ["sweep-cwfedavg-lam", "sweep-cwfedavg-lam-distance"]


@pytest.mark.full
def test_a_method_without_rounds_stands_with_the_others(tmp_path: Path) -> None:
    """It is in the figures of the others, and so in one of each; with a sweep over rounds it is in each setting."""
    comparison = read_comparison(madeup.comparison(tmp_path / "one", ["fedavg", "lda(base=none)", "local"]))
    gallery = figures.of_comparison(comparison)
    assert gallery.missing == []
    (traffic,) = (d for d in gallery.drawings if d.id.startswith("traffic"))
    assert "LDA (base=none)" in traffic.alt
    (loss,) = (d for d in gallery.drawings if d.id.startswith("training-loss"))
    assert loss.alt.startswith("Line charts of the training loss by round. FedAvg 2.00 to ") and "LDA" not in loss.alt
    out = tmp_path / "swept"
    for rounds in (2, 3):
        madeup.comparison(out / f"{rounds}", ["fedavg", "lda(base=none)"], seeds=1, rounds=rounds)
        shutil.move(out / f"{rounds}" / "runs", out / "runs" / f"digits-dirichlet-0.5-num-server-rounds={rounds}")
    tables = [pd.read_csv(out / f"{n}" / "results.csv").assign(sweep=f"num-server-rounds {n}") for n in (2, 3)]
    pd.concat(tables).to_csv(out / "results.csv", index=False)
    swept = read_comparison(out)
    assert [s["num-server-rounds"] for s, _ in groups_of(swept.runs)] == [2, 3] and len(swept.labels) == 2
    assert all(sum(a.tells_of(r) for r in swept.runs) == 2 for a in answers_of(swept))


@pytest.mark.full
def test_with_another_reference_training_alone_is_a_row(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for reference, caption in (("fedavg", False), ("local", True)):
        out = madeup.comparison(tmp_path / reference, ["fedavg", "local"], reference=reference)
        found = {d.id: d for d in figures.of_comparison(read_comparison(out)).drawings}
        row = "training alone" if reference == "fedavg" else "FedAvg"
        assert f" in points. {row} " in found["forest-headline"].alt
        assert all((PAIRED in d.caption) == caption for name, d in found.items() if name == "forest-received_accuracy")
    assert not [str(w.message) for w in recwarn if "matplotlib" in w.filename or "results" in w.filename]


def test_a_finished_run_without_rounds_is_not_to_be_resumed(tmp_path: Path) -> None:
    out = madeup.comparison(tmp_path, ["lda(base=none)", "local"], seeds=1) / "runs" / "lda-base=none-s0"
    gallery = figures.of_run(read_run(out))
    assert gallery.missing == [] and "client-accuracy" in {d.id for d in gallery.drawings}
    page = report.of_run(read_run(out), gallery)
    assert "<dd class=note>once</dd>" in page and ", no rounds, model" in page and "in a round" not in page
    assert "all clients after one exchange" in page
    assert words.unfinished(read_run(out), "no client was scored").command == ""


def test_a_client_without_test_rows_has_no_bar_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    figure = plots.client_scores({"a": np.array([0.5, np.nan]), "b": np.array([0.7, np.nan])}, [0, 1])
    assert len(figure.axes[0].collections[0].get_paths()) == 1 and len(recwarn) == 0


# ---- what is drawn and what is left out ------------------------------------------------------------------------------

ALWAYS = {
    "learning-curves", "training-loss", "client-accuracy", "labels-heat", "round-seconds",
}  # fmt: skip


@pytest.mark.full
def test_each_kind_of_run_has_its_figures(cw: RunResult, ccvr: RunResult) -> None:
    found = figures.of_run(cw)
    assert {d.id for d in found.drawings} == ALWAYS | {"head-norms", "who-learns-from-whom"}
    assert all("drawn" not in m.why for m in found.missing)
    found = figures.of_run(ccvr)
    assert {d.id for d in found.drawings} == ALWAYS and not found.missing, "what means nothing for it is not named"
    for drawing in found.drawings:
        assert len(drawing.alt) > 30
        assert drawing.caption.endswith(".")


def test_what_is_left_out_says_why_and_what_to_do(cw: RunResult, tmp_path: Path) -> None:
    moved = tmp_path / "bare"
    shutil.copytree(cw.out, moved)
    shutil.rmtree(moved / "state")
    found = figures.of_run(read_run(moved))
    missing = {m.title: m for m in found.missing}
    name = "Head norms against class counts"
    assert "stored states are missing" in missing[name].why and missing[name].command.startswith("fedapp run")
    assert {d.id for d in found.drawings} >= {"learning-curves", "labels-heat"}


def test_a_run_on_devices_has_curves_and_no_data(cw: RunResult, tmp_path: Path) -> None:
    moved = tmp_path / "devices"
    shutil.copytree(cw.out, moved)
    shutil.rmtree(moved / "state")
    for name in ("data_card.json", "partition.npz"):
        (moved / name).unlink()
    found = figures.of_run(read_run(moved))
    on_the_server = {"learning-curves", "training-loss", "client-accuracy", "round-seconds", "who-learns-from-whom"}
    assert {d.id for d in found.drawings} == on_the_server
    assert any("keep their class counts to themselves" in m.why for m in found.missing)


# ---- how figures are written -----------------------------------------------------------------------------------------


def drawing(seed: int = 0) -> style.Drawing:
    rng = np.random.default_rng(seed)
    lines = [pieces.Curve(n, np.arange(1, 6), rng.random(5), 0.1 * rng.random(5)) for n in ("a", "b & <c>")]
    return style.Drawing("x-y", "title", "caption.", "alt <&>", plots.curves({"p": lines, "q": lines}))


def test_the_same_data_give_the_same_bytes() -> None:
    assert drawing().svg() == drawing().svg()
    assert drawing().svg(text=False) == drawing().svg(text=False)
    assert drawing().png() == drawing().png()
    assert drawing().svg() != drawing(1).svg()


def test_inline_figures_have_their_own_ids_and_no_reference_to_the_web() -> None:
    svg = drawing().inline
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(i.startswith("x-y-") for i in ids)
    for reference in re.findall(r'href="([^"]+)"', svg) + re.findall(r"url\(([^)]+)\)", svg):
        assert reference.startswith("#x-y-")
        assert reference[1:] in ids
    assert set(re.findall(r'https?://[^"]+', svg)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    assert "alt &lt;&amp;&gt;" in svg
    assert style.INK not in svg
    assert "currentColor" in svg


@pytest.mark.parametrize(
    "text", ["mu=0.00123", ' id="a" href="#b" url(#c)', f"{style.INK} 'DejaVu Sans', x", "$5_$10", "a$_$b"]
)
def test_texts_of_a_figure_stay_as_they_are(text: str) -> None:
    lines = [pieces.Curve(text, np.arange(3), np.ones(3))]
    shown = style.Drawing("x", "", "", "", plots.curves({"": lines})).inline
    assert shown.count(f">{text}<") == 2, "on a wide page and on a narrow one"


def test_a_figure_that_cannot_be_written_does_not_cost_the_page() -> None:
    gallery = figures.Gallery()
    broken = drawing()
    broken.figure.text(0, 0, "$5_$", parse_math=True)
    gallery.add_all([Job("scores", "A", lambda: [broken]), Job("scores", "B", lambda: [drawing()])], lambda *_: None)
    assert len(gallery.drawings) == 1 and [m.title for m in gallery.missing] == ["A"]


@pytest.mark.parametrize("clients", [3, gains.MOST_CLIENTS + 1])
def test_clients_that_only_the_leader_scored_have_a_row_and_many_clients_the_ends(
    clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = np.linspace(0.1, -0.1, clients)
    whole = pd.DataFrame({"side": np.sign(gain), "score": 0.5 + gain, "alone": 0.5, "rows": 9})
    run: Any = SimpleNamespace(seed=0, label="a", name_of=str)
    found = {"a": [(run, whole)], "b": [(run, whole.drop(1))]}
    monkeypatch.setattr(gains, "_clients", lambda runs: (found, 1))
    first, _ = gains.clients([], "a", "", "")
    left, right = first.figure.axes
    shown = min(clients, gains.MOST_CLIENTS)
    assert [t.get_text() for t in left.get_yticklabels()][:: shown - 1] == ["0", str(clients - 1)]
    marks = [[*line.get_ydata()] for axes in (left, right) for line in axes.lines[:1]]
    assert marks == [[*range(shown)], [0, *range(2, shown)]]
    assert ("clients" in first.caption) == (clients > 3)


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)
    drawing().svg()
    assert dict(mpl.rcParams) == before


def luminance(colour: str) -> float:
    """Relative luminance of sRGB."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", style.COLOURS)
def test_colours_stand_out_from_white_and_from_black_paper(colour: str) -> None:
    """A contrast of 3 to 1 on white and on the page's dark colour (graphics, WCAG 2.1, 1.4.11)."""
    light = luminance(colour)
    assert 1.05 / (light + 0.05) >= 3
    assert (light + 0.05) / (luminance("#15171a") + 0.05) >= 3


def test_lines_can_be_told_apart_without_colour() -> None:
    looks = [pieces.look_of(str(i), [str(k) for k in range(21)]) for i in range(21)]
    marks = [(str(k["linestyle"]), k["marker"], k["markerfacecolor"] == "none") for k in looks]
    assert len(set(marks)) == 21


def rotated(colour: tuple[float, ...]) -> tuple[float, ...]:
    """What the page's filter makes of a colour: invert, turn the hue by 180 degrees, 80 % of the brightness (CSS)."""
    turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    return tuple(np.clip(0.8 * np.clip(turn @ (1 - np.array(colour[:3])), 0, 1), 0, 1))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_heat_maps_can_be_read_in_both_schemes(scheme: str) -> None:
    values = np.linspace(0, 1, 400)[None]
    axes = mpl.figure.Figure().subplots()
    pieces.heat_map(axes, values, (), (), high=1.0, fmt=".3f")
    assert len(axes.texts) == 399
    for text in axes.texts:
        cell: Any = style.HEAT(float(text.get_text()))
        white = text.get_color() == style.ON_DARK
        if scheme == "dark":
            cell, white = rotated(cell), not white
        shine = pieces.brightness(cell) + 0.05
        assert (1.05 / shine if white else shine / 0.05) >= 4.5


def test_norms_of_methods_are_on_one_scale() -> None:
    panels = {"class counts": np.array([[5.0, 9]]), "a": np.array([[1.0, 2]]), "b": np.array([[0.5, 7]])}
    figure = maps.norm_maps(panels, ["0", "1"], [0])
    assert [axes.images[0].get_clim() for axes in figure.axes[:3]] == [(5, 9), (0.5, 7), (0.5, 7)]


def test_heat_maps_go_from_light_to_dark() -> None:
    shades = [luminance(mpl.colors.to_hex(style.HEAT(v))) for v in np.linspace(0, 1, 64)]
    assert all(a > b for a, b in itertools.pairwise(shades))


def test_many_clients_and_classes_are_drawn() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (120, 100))
    names = [f"class {i}" for i in range(100)]
    for figure in (
        maps.label_heat(counts, names),
        maps.mixing(counts / 9, range(120)[:120]),
    ):
        assert len(figure.axes[0].get_xticks()) <= 40

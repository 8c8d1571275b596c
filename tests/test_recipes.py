"""The shipped recipes: all valid, dealable at full size, bundled, and scaled as stated."""

from __future__ import annotations

import io
import re
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedapp import cli, registry
from fedapp.cli import listing
from fedapp.data import datasets
from fedapp.data.dataset import Dataset
from fedapp.engines import local as engine
from fedapp.engines.control import stage
from fedapp.errors import BadRequest, named_values
from fedapp.experiments import compare, recipes, shipped
from fedapp.tasks import simulated as tasks
from fedapp.tasks.public import public_source

ROOT = Path(__file__).parent.parent
PAPERS = {
    "fedclassavg": "FedClassAvg (Jang et al., ICPP 2022)",
    "cwfedavg": "cwFedAvg (Lee and Choi, ICCV 2025)",
    "fedgh": "FedGH (Yi et al., ACM MM 2023)",
    "ccvr": "CCVR (Luo et al., NeurIPS 2021)",
}
NAMES = [n for n in recipes.shipped() if n not in ("digits", "har")]

# classes, side, channels, images for training and for testing, as published
SHAPES = {
    "mnist": (10, 28, 1, 60_000, 10_000),
    "fashion_mnist": (10, 28, 1, 60_000, 10_000),
    "emnist_letters": (26, 28, 1, 124_800, 20_800),
    "cifar10": (10, 32, 3, 50_000, 10_000),
    "cifar100": (100, 32, 3, 50_000, 10_000),
    "tiny_imagenet": (200, 64, 3, 100_000, 10_000),
    "cinic10": (10, 32, 3, 90_000, 90_000),
}


def blank(name: str, data_dir: str | None = None, *_: object) -> Dataset:
    """A data set of the published size whose images are one black pixel, seen many times."""
    classes, side, channels, train, test = SHAPES[name]

    def part(count: int) -> tuple[Any, Any]:
        x = np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (count, side, side, channels))
        return x, np.arange(count, dtype=np.int64) % classes

    x_train, y_train = part(train)
    x_test, y_test = part(test)
    names = tuple(map(str, range(classes)))
    return Dataset(name, x_train, y_train, x_test, y_test, names, 255.0, (0.5,) * channels, (0.5,) * channels)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tasks._federated.cache_clear()
    monkeypatch.setattr(datasets, "load", blank)
    monkeypatch.setattr(datasets, "_latest", {})  # without data sets that earlier tests loaded under these names
    yield
    tasks._federated.cache_clear()


def flat(name: str) -> dict[str, Any]:
    return dict(recipes.shipped()[name].settings)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_its_table_and_every_value_its_source(name: str) -> None:
    recipe = recipes.shipped()[name]
    paper, place = name.split("-")[:2]
    number = re.fullmatch(r"(table|figure)(\d)", place)
    assert number is not None
    assert recipe.title.startswith(f"{PAPERS[paper]}, {number[1].capitalize()} {number[2]}: ")
    for line in recipe.text.splitlines():
        if line and not line.startswith("#"):
            assert re.search(r"  # .*(paper|released code|ours|MOON's code|PFLlib's generator)", line), line


WITH_PUBLIC = [n for n in NAMES if "ktpfl" in recipes.shipped()[n].methods]


@pytest.mark.parametrize("name", WITH_PUBLIC)
def test_all_rows_of_a_table_with_ktpfl_train_on_the_same_images(name: str, published: None, tmp_path: Path) -> None:
    """At full size, and scaled, where public images come from another data set."""
    recipe = recipes.shipped()[name]
    values = {**recipe.settings, "precision": "fp32"}
    variants = compare.parse_variants(recipe.methods)
    jobs = compare.jobs_of(values, variants, {"": {}}, 1, tmp_path)
    held = set()
    for job in jobs:
        source = public_source(job.config)
        held.add(source.share if source else 0.0)
    assert len(held) == 1 and len(jobs) == len(variants) > 1
    assert held == ({0.0} if ":" in str(values.get("public-data", "")) else {0.05})


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_for_run_and_for_all_rows_of_its_table(name: str) -> None:
    values, recipe = flat(name), recipes.shipped()[name]
    assert values["method"] == name.split("-")[0]
    resolved = engine.effective(values)
    assert "auto" not in (
        resolved.model.model,
        resolved.training.lr,
        resolved.training.optimizer,
        resolved.training.weight_decay,
        resolved.training.augment,
    )
    variants = compare.parse_variants(recipe.methods)
    assert [v.label for v in variants] == [re.sub(r"\s+", " ", e) for e in recipe.rows], "rows are written as labels"
    assert all(recipe.rows.values()), "every row says what the paper calls it"
    for variant in variants:
        args = {**named_values("method-args", values.get("method-args", ""), ""), **dict(variant.args)}
        own = {**values, **dict(variant.settings), "method": variant.method}
        own["method-args"] = " ".join(
            f"{k}={v}" for k, v in (args if variant.method == values["method"] else dict(variant.args)).items()
        )
        engine.effective(own)


def test_the_recipes_of_the_papers_are_pinned() -> None:
    """Settings come from several places of a paper's file; these are what they must give, written out."""
    assert len(NAMES) == 66
    assert sum(len(recipes.shipped()[n].rows) for n in NAMES) == 409
    assert sum(len(flat(n)) for n in NAMES) == 1321
    assert flat("fedclassavg-table3-emnist-100") == {
        "method": "fedclassavg", "method-args": "preset=paper rho=0.1", "dataset": "emnist_letters", "clients": 100,
        "fraction-train": 0.1, "partition": "dirichlet", "alpha": 0.5, "min-samples": 10, "split": "official",
        "model": "resnet18", "num-server-rounds": 1000, "local-epochs": 1, "batch-size": 64, "lr": 0.0005,
        "optimizer": "adam", "weight-decay": 0.0, "clip": 0.0, "augment": "strong", "public-data": "mnist:3000",
    }  # fmt: skip
    assert flat("cwfedavg-table1-tiny-resnet18-dirichlet") == {
        "method": "cwfedavg", "method-args": "lam=2000", "dataset": "tiny_imagenet", "clients": 20,
        "fraction-train": 1.0, "partition": "dirichlet", "alpha": 0.1, "min-samples": 40, "split": "holdout",
        "partition-seed": 1, "model": "resnet18", "buffers": "local", "num-server-rounds": 1000, "local-epochs": 1,
        "batch-size": 10,
        "lr": 0.005, "optimizer": "sgd", "momentum": 0.0, "weight-decay": 0.0, "clip": 0.0, "augment": "none",
        "protocols": "received,trained",
    }  # fmt: skip
    assert flat("fedgh-figure4-cifar100") == {
        "method": "fedgh", "method-args": "header_lr=0.01 header_batch=sample header_epochs=1 header_clip=50",
        "dataset": "cifar100", "clients": 100, "fraction-train": 0.1, "partition": "classes",
        "classes-per-client": 10, "min-samples": 10, "split": "official",
        "model": "fedgh-1,fedgh-2,fedgh-3,fedgh-4,fedgh-5", "num-server-rounds": 500, "local-epochs": 10,
        "batch-size": 64, "lr": 0.01, "optimizer": "sgd", "momentum": 0.9, "weight-decay": 0.001, "clip": 50.0,
        "augment": "weak", "protocols": "received,trained",
    }  # fmt: skip
    assert flat("ccvr-table2-cinic10") == {
        "method": "ccvr", "method-args": "base=fedavg samples=1000 epochs=3 transform=sample oracle=true",
        "dataset": "cinic10", "clients": 10, "fraction-train": 1.0, "partition": "dirichlet", "alpha": 0.5,
        "min-samples": 10, "split": "official", "model": "mobilenetv2-plain", "num-server-rounds": 100,
        "local-epochs": 10, "batch-size": 64, "lr": 0.01, "optimizer": "sgd", "momentum": 0.9, "weight-decay": 1e-5,
        "clip": 0.0, "augment": "weak", "protocols": "received,trained,global",
    }  # fmt: skip
    weights = "ktpfl(share=weights step=fixed coefficients=free lr_c={} rho={} epochs=growing lr=0.01 optimizer=sgd "
    weights += "momentum=0 batch-size=32 augment={})"
    for name, own in (("cifar10", ("0.01", "0.7", "weak")), ("emnist", ("0.005", "0.6", "none"))):
        assert weights.format(*own) in recipes.shipped()[f"fedclassavg-table3-{name}-20"].rows
    assert recipes.shipped()["ccvr-table2-cifar100"].rows == {
        "ccvr": "FedAvg, 66.25 -> 66.60, oracle 66.84",
        "ccvr(base=fedprox base.mu=0.01)": "FedProx, 66.31 -> 66.61, oracle 66.68",
        "ccvr(base=fedavgm base.momentum=0.1 base.dampening=0.1)": "FedAvgM, 66.43 -> 66.71, oracle 66.94",
        "ccvr(base=moon base.mu=1)": "MOON, 67.02 -> 67.17, oracle 67.56",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace('like = ["a"]', 'like = ["b"]'), "recipe r: there is no part or word called 'b'"),
        (lambda t: t.replace('["1.0"]', '["1.0", "2.0"]'), "numbers without a row: 2.0"),
        (lambda t: t.replace('["1.0"]', "[]"), "row 'fedavg' has no number"),
        (lambda t: t.replace("{clients}", "{cilents}"), "recipe r: there is no part or word called 'cilents'"),
        (lambda t: t.replace('clients = [3, "paper"]', "clients = 3"), "part.a.settings.clients"),
        (lambda t: t.replace("clients =", "cilents ="), "unknown key 'cilents', did you mean 'clients'"),
        (lambda t: t.replace("notes =", "note ="), "common.note: Extra inputs"),
    ],
)
def test_a_wrong_paper_file_is_refused_and_the_place_is_named(change: Any, message: str, tmp_path: Path) -> None:
    text = """
        paper = "P"
        [common]
        notes = "n"
        rows = [["fedavg", "FedAvg, {}"]]
        [part.a]
        title = "Table 1: {clients} clients."
        settings.clients = [3, "paper"]
        [[recipe]]
        name = "r"
        like = ["a"]
        published = ["1.0"]
    """
    file = tmp_path / "p.toml"
    file.write_text(text)
    ((name, written),) = shipped.read(file, recipes.Paper).texts()
    assert name == "r" and written.startswith("# P, Table 1: 3 clients.\n")
    file.write_text(change(text))
    with pytest.raises(BadRequest, match=message):
        list(shipped.read(file, recipes.Paper).texts())


def test_a_part_that_is_named_later_goes_before(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("""
        paper = "P"
        [common]
        title = "T"
        notes = "first"
        rows = [["fedavg", "FedAvg"]]
        words = { w = "common" }
        settings = { clients = [1, "c"], seed = [1, "c"], lr = [1.0, "c"], alpha = [1.0, "c"] }
        [part.a]
        title = "A, {lr}"
        notes = "second"
        settings = { clients = [2, "a"], seed = [2, "a"], lr = [2.0, "a"] }
        [part.b]
        settings = { clients = [3, "b"], seed = [3, "b"] }
        words = { w = "b", lr = "fast" }
        [[recipe]]
        name = "r"
        like = ["a", "b"]
        notes = "third {w} {alpha}"
        settings = { clients = [4, "own"] }
    """)
    ((name, text),) = shipped.read(tmp_path / "p.toml", recipes.Paper).texts()
    recipe = recipes.parse(name, text, tomllib.loads(text))
    assert recipe.settings == {"clients": 4, "seed": 3, "lr": 2.0, "alpha": 1.0}
    assert "lr = 2.0  # a\n" in text and "clients = 4  # own\n" in text
    assert "# first\n# second\n# third b 1.0\n" in text
    assert recipe.methods == "fedavg" and recipe.title == "P, A, fast"


def test_every_table_of_the_four_papers_has_recipes() -> None:
    found = {tuple(n.split("-")[:2]) for n in NAMES}
    wanted = {("fedclassavg", f"table{t}") for t in (2, 3, 4, 5)} | {("cwfedavg", f"table{t}") for t in (1, 2, 3, 4)}
    wanted |= {("fedgh", p) for p in ("table1", "table3", "figure3", "figure4", "figure5")}
    wanted |= {("ccvr", f"table{t}") for t in (1, 2, 3, 4, 5)}
    assert found == wanted


def test_every_method_stands_in_some_row() -> None:
    used = {v.method for n in NAMES for v in compare.parse_variants(recipes.shipped()[n].methods)}
    assert used | set(recipes.shipped()["har"].rows) >= set(registry.discover())
    bases = {flat(n)["method-args"] for n in NAMES} | {e for n in NAMES for e in recipes.shipped()[n].rows}
    assert any("base=moon" in b for b in bases)
    assert any("base=fedavgm" in b for b in bases)


@pytest.mark.full
def test_every_recipe_can_be_dealt_at_published_size_and_scaled_to_a_tenth(published: None) -> None:
    by_data = sorted(NAMES, key=lambda n: str([flat(n).get(k) for k in ("dataset", "partition", "alpha", "clients")]))
    for name in by_data:
        resolved = engine.effective(flat(name))
        data = tasks.check(resolved, resolved.data.clients)
        assert len(data.partition.clients) == resolved.data.clients
        if resolved.data.dataset in ("cifar10", "mnist"):
            small, _ = recipes.scaled(flat(name), 0.1)
            shrunk = engine.effective(small)
            assert len(tasks.check(shrunk, shrunk.data.clients).dataset.y_train) <= 0.11 * len(data.dataset.y_train)


@pytest.mark.parametrize("name", ["fedclassavg-table2-cifar10-skewed", "cwfedavg-table1-cifar10-pathological"])
def test_commands_in_the_comments_are_accepted(name: str, published: None, tmp_path: Path) -> None:
    """`fedapp compare NAME` as the recipe says goes through all checks, up to an output folder that is a file."""
    found = re.search(r"^# fedapp (compare .*)$", recipes.shipped()[name].text, flags=re.M)
    assert found is not None
    out = tmp_path / "out"
    out.write_text("a file where a folder should be")
    words = [*found[1].split(), "--scale", "0.1", "--out", str(out)]
    result = CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, BadRequest)
    assert "out" in str(result.exception)


# ---- scale -----------------------------------------------------------------------------------------------------------


def test_scale_shrinks_rounds_data_and_models_and_nothing_else() -> None:
    values = {
        "num-server-rounds": 1000, "min-samples": 40, "patience": 30, "data-fraction": 0.5, "dataset": "cifar10",
        "model": "resnet18,shufflenetv2,googlenet,alexnet", "public-data": "cifar100:3000", "local-epochs": 10,
        "lr": 0.1, "clients": 20,
    }  # fmt: skip
    new, told = recipes.scaled(values, 0.1)
    assert new == {
        **values, "num-server-rounds": 100, "min-samples": 5, "patience": 3, "data-fraction": 0.05,
        "model": "cnn-a,cnn-b,cnn-c,cnn-d", "public-data": "cifar100:300",
    }  # fmt: skip
    for text in ("scale 0.1", "num-server-rounds 1000 -> 100", "model resnet18", "data-fraction 0.5 -> 0.05"):
        assert text in told
    tiny, _ = recipes.scaled(values, 0.001)
    assert (tiny["num-server-rounds"], tiny["min-samples"], tiny["public-data"]) == (2, 5, "cifar100:100")


def test_scale_never_enlarges() -> None:
    values = {"num-server-rounds": 1, "min-samples": 3, "public-data": "mnist:50", "dataset": "fashion_mnist"}
    new, _ = recipes.scaled(values, 0.5)
    assert (new["num-server-rounds"], new["min-samples"], new["public-data"]) == (1, 3, "mnist:50")
    assert new["data-fraction"] == 0.5
    assert "patience" not in new


@pytest.mark.parametrize(
    ("model", "dataset", "light"),
    [
        ("cnn", "cifar10", "cnn-a"),
        ("fedgh-1,fedgh-2,fedgh-3,fedgh-4,fedgh-5", "cifar10", "cnn-a,cnn-b,cnn-c,cnn-d,cnn-a"),
        ("moon", "cifar10", "moon"),
        ("auto", "cifar10", "cnn-a"),
        ("auto", "digits", "digits-a"),
        ("digits-a,digits-b", "digits", "digits-a,digits-b"),
        ("cnn-b,cnn-b,resnet18", "mnist", "cnn-b,cnn-b,cnn-a"),
    ],
)
def test_light_models(model: str, dataset: str, light: str) -> None:
    assert recipes.light(model, dataset) == light


def test_scale_one_changes_nothing_and_others_are_refused() -> None:
    values = flat("ccvr-table2-cifar100")
    assert recipes.scaled(values, 1.0)[0] == values
    for bad in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(BadRequest, match="--scale"):
            recipes.scaled(values, bad)


# ---- command line ----------------------------------------------------------------------------------------------------


def dry_run(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["run", *words, "--dry-run", "--engine", "local"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return tomllib.loads("\n".join(line for line in result.stdout.splitlines() if re.match(r"[a-z-]+ = ", line)))


def test_run_takes_a_recipe_by_name_and_scales_what_the_command_line_does_not_say() -> None:
    words = ("cwfedavg-table1-cifar10-dirichlet", "--dataset", "digits", "--clients", "5", "--set", "alpha=1.0")
    shown = dry_run(*words, "--scale", "0.5", "--set", "data-fraction=1.0")
    assert (shown["num-server-rounds"], shown["model"], shown["min-samples"]) == (500, "cnn-a", 20)
    assert (shown["data-fraction"], shown["lr"], shown["batch-size"]) == (1.0, 0.005, 10)
    assert dry_run(*words, "--scale", "0.5", "--rounds", "7")["num-server-rounds"] == 7
    assert dry_run(*words, "--set", "model=cnn-b")["num-server-rounds"] == 1000


def test_the_line_of_a_scale_names_what_changes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    cli.collect({"num-server-rounds": 50}, ["patience=7"], {"num-server-rounds": 300, "patience": 20}, 0.1)
    assert (
        capsys.readouterr().err == "scale 0.1: data-fraction 1.0 -> 0.1, min-samples 10 -> 5, model auto -> digits-a\n"
    )


@pytest.mark.parametrize("scale", [(), ("--scale", "0.5")])
@pytest.mark.parametrize("command", ["run", "compare", "partition"])
@pytest.mark.parametrize("line", ["seed = 2.7", 'seed = "abc"', 'alpha = "0.1"', 'num-server-rounds = "ten"'])
def test_values_of_a_file_have_the_types_of_their_keys(
    line: str, command: str, scale: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(f"{line}\n")
    words = [command, str(tmp_path / "a.toml"), *(scale if command != "partition" else ())]
    result = CliRunner().invoke(cli.app, words)
    assert isinstance(result.exception, BadRequest) and line in str(result.exception).replace("'", '"'), result.output


@pytest.mark.parametrize("item", ["out=x", "resume=true"])
@pytest.mark.parametrize("command", ["compare", "partition"])
def test_a_command_that_makes_no_single_run_takes_no_run_directory_from_a_key(command: str, item: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--set", item])
    assert str(result.exception) == f"--set {item} has no effect here: give --out DIR"


@pytest.mark.full
def test_the_configuration_that_a_run_wrote_repeats_it_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--engine", "local", "--clients", "3", "--rounds", "2", "--set", "data-fraction=0.3")

    def table(folder: Path | str) -> pd.DataFrame:
        found = pd.read_csv(Path(folder) / "rounds.csv")
        return found[[c for c in found if not c.endswith("seconds")]]

    assert CliRunner().invoke(cli.app, ["run", *words, "--out", "a"]).exit_code == 0
    for more, out in ((["--out", "b"], "b"), (["--set", "out=c"], "c"), ([], "runs/fedclassavg*")):
        result = CliRunner().invoke(cli.app, ["run", "a/config.toml", "--engine", "local", *more])
        assert result.exit_code == 0, result.exception
        (folder,) = tmp_path.glob(out)
        pd.testing.assert_frame_equal(table(folder), table("a"))
    result = CliRunner().invoke(cli.app, ["run", *words, "--out", "d", "--set", "out=e"])
    assert str(result.exception) == "out is given twice: --out says 'd', --set out=e says 'e'; give it once"


def test_an_unknown_recipe_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BadRequest, match="cwfedavg-table4-tiny"):
        recipes.find(Path("cwfedavg-table4-tinny"))
    with pytest.raises(BadRequest, match=r"some/where.toml does not exist"):
        recipes.find(Path("some/where.toml"))
    with pytest.raises(BadRequest, match="the shipped recipe is called cwfedavg-table4-tiny"):
        recipes.find(Path("fedapp/conf/cwfedavg-table4-tiny.toml"))


def test_a_file_goes_before_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.find(Path("digits")).settings["clients"] == 10
    Path("digits").mkdir()
    assert recipes.find(Path("digits")).settings["clients"] == 10, "no folder hides a recipe"
    Path("digits").rmdir()
    Path("digits").write_text("clients = 3\n")
    assert recipes.find(Path("digits")).settings == {"clients": 3}


def test_resume_and_scale_do_not_go_together(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["run", "--resume", str(tmp_path), "--scale", "0.5"])
    assert isinstance(result.exception, BadRequest)


def test_a_recipe_that_is_printed_and_saved_is_the_same_recipe(tmp_path: Path) -> None:
    for name in ("digits", "fedgh-table1-cifar10-50", "fedclassavg-table2-fashion-skewed"):
        result = CliRunner().invoke(cli.app, ["recipes", name])
        assert result.exit_code == 0
        file = tmp_path / f"{name}.toml"
        file.write_text(result.stdout)
        assert recipes.find(file) == recipes.shipped()[name]
    assert (shipped.FOLDER / "digits.toml").read_text() == recipes.shipped()["digits"].text


def test_recipes_are_listed_one_a_line() -> None:
    result = CliRunner().invoke(cli.app, ["recipes"])
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [n for n, _ in lines] == sorted(recipes.shipped(), key=listing._numbered)


# ---- packaging -------------------------------------------------------------------------------------------------------


def test_recipes_travel_in_the_bundle_and_in_the_wheel(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    bundle = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(stage(tmp_path / "app"))))
    bundled = {n for n in bundle.namelist() if n.startswith("fedapp/conf/")}
    assert bundled == {str(p.relative_to(ROOT)) for p in shipped.FOLDER.rglob("*") if p.is_file()}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "fedapp" in wheel["packages"]
    assert not {"exclude", "only-include"} & set(wheel)
